"""The table of all built-in algorithms, tasks, rewards, environments, agents, tools and engines.

It is written out, so that `lmgym list` does not import them. A test compares it with the `@register` decorators.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One line of `lmgym list`.

    Example: Entry("lmgym.rewards.text.form:length", "1 at the target number of words, falling off linearly")
    """

    target: str  # "module:attribute"
    summary: str  # one line
    needs: str = ""  # names in availability.NEEDS, separated by ", ": an extra, a model, Java ...; empty: nothing
    substitute: str = ""  # of a metric: another one of the same arguments, reported where this one cannot run


BUILTIN: dict[str, dict[str, Entry]] = {
    "algorithm": {
        "reinforce": Entry(
            "lmgym.algorithms.reinforce:Reinforce", "REINFORCE; baseline none, mean, ema or scst (greedy answer)"
        ),
        "rloo": Entry(
            "lmgym.algorithms.reinforce:RLOO", "REINFORCE whose baseline is the mean of the rest of the group"
        ),
        "reinforce_pp": Entry(
            "lmgym.algorithms.reinforce_pp:ReinforcePlusPlus",
            "REINFORCE++: clipped ratio, advantages whitened globally",
        ),
        "reinforce_stable": Entry(
            "lmgym.algorithms.reinforce_stable:ReinforceStable",
            "returns per turn, clamped, and a KL to a reference that is refreshed",
        ),
        "grpo": Entry("lmgym.algorithms.grpo:GRPO", "group-centred advantages, clipped ratio, token-sum loss"),
        "dr_grpo": Entry("lmgym.algorithms.grpo:GRPO", "grpo, preset: sums over a constant, no scaling"),
        "dapo": Entry("lmgym.algorithms.grpo:GRPO", "grpo, preset: dynamic sampling, higher upper clip, token mean"),
        "gspo": Entry("lmgym.algorithms.grpo:GRPO", "grpo, preset: one clipped ratio for each answer"),
        "cispo": Entry("lmgym.algorithms.grpo:GRPO", "grpo, preset: clipped weights, every token keeps its gradient"),
        "sapo": Entry("lmgym.algorithms.grpo:GRPO", "grpo, preset: a soft gate in place of the clip"),
        "dppo": Entry("lmgym.algorithms.grpo:GRPO", "grpo, preset: mask on changes of probability since sampling"),
        "ppo": Entry("lmgym.algorithms.actor_critic:PPO", "proximal policy optimisation with a value function"),
        "nlpo": Entry("lmgym.algorithms.nlpo:NLPO", "PPO on the tokens that a mask policy finds likely"),
        "trpo": Entry("lmgym.algorithms.trpo:TRPO", "natural-gradient step of a given divergence, with a line search"),
        "a2c": Entry("lmgym.algorithms.actor_critic:A2C", "advantage actor-critic, one step per batch"),
        "raft": Entry("lmgym.algorithms.raft:RAFT", "imitates the best answers of each group (expert iteration, ReST)"),
        "distill": Entry(
            "lmgym.algorithms.distill:Distill", "learns from a teacher, on the student's own answers or on its texts"
        ),
        "replay": Entry("lmgym.algorithms.replay:Replay", "grpo that also trains on weighted groups of earlier steps"),
        "supervised": Entry("lmgym.algorithms.supervised:Supervised", "cross-entropy on the references (warm start)"),
    },
    "task": {
        "arithmetic": Entry("lmgym.tasks.arithmetic:arithmetic", "generated word problems, difficulty as arguments"),
        "gsm8k": Entry("lmgym.tasks.gsm8k:gsm8k", "grade-school maths, Hub or local file", "path= or lmgym[data]"),
        "math": Entry("lmgym.tasks.math:math", "competition mathematics, Hub or local file", "path= or lmgym[data]"),
        "svamp": Entry("lmgym.tasks.svamp:svamp", "one-step word problems, Hub or local file", "path= or lmgym[data]"),
        "reasoning_gym": Entry(
            "lmgym.tasks.reasoning_gym:reasoning_gym", "generated puzzles, a hundred kinds by name", "lmgym[reasoning]"
        ),
        "mixture": Entry("lmgym.tasks.mixture:mixture", "several tasks as one, each with a weight"),
        "episodes": Entry("lmgym.tasks.episodes:episodes", "numbered episodes, for environments that need no data"),
        "topics": Entry("lmgym.tasks.topics:topics", "open writing prompts without right answers"),
        "jsonl": Entry("lmgym.tasks.jsonl:jsonl", "any .jsonl file with prompt and reference columns", "path="),
        "increasing_numbers": Entry(
            "lmgym.tasks.synthetic:increasing_numbers", "a number to count on from, or one prompt"
        ),
        "sentences_with_dates": Entry(
            "lmgym.tasks.synthetic:sentences_with_dates", "beginnings of a sentence that ask for a date"
        ),
        "dummy": Entry("lmgym.tasks.synthetic:dummy", "one prompt again and again"),
        "imdb": Entry(
            "lmgym.tasks.sentiment:imdb",
            "the first half of film reviews, to be continued",
            "path= or lmgym[data]",
        ),
        "imdb_seq2seq": Entry(
            "lmgym.tasks.sentiment:imdb_seq2seq",
            "the same for supervised training of encoder-decoders",
            "path= or lmgym[data]",
        ),
        "common_gen": Entry(
            "lmgym.tasks.common_gen:common_gen",
            "a sentence with given concepts, several references",
            "path= or lmgym[data]",
        ),
        "cnn_daily_mail": Entry(
            "lmgym.tasks.summarisation:cnn_daily_mail",
            "news articles and their highlights",
            "path= or lmgym[data]",
        ),
        "xsum": Entry("lmgym.tasks.summarisation:xsum", "news articles in one sentence", "path= or lmgym[data]"),
        "totto": Entry(
            "lmgym.tasks.tables:totto",
            "a sentence about highlighted cells of a table",
            "path= or lmgym[data]",
        ),
        "dart": Entry(
            "lmgym.tasks.triples:dart",
            "texts about sets of triples, from many sources",
            "path= or lmgym[data]",
        ),
        "web_nlg": Entry(
            "lmgym.tasks.triples:web_nlg",
            "texts about sets of Wikipedia's triples",
            "path= or lmgym[data]",
        ),
        "narrative_qa": Entry(
            "lmgym.tasks.narrative_qa:narrative_qa",
            "questions about a summary, two answers each",
            "path= or lmgym[data]",
        ),
        "parallel": Entry(
            "lmgym.tasks.translation:parallel",
            "any text in two languages, files of lines or of rows",
            "path= or lmgym[data]",
        ),
        "wmt14": Entry("lmgym.tasks.translation:wmt14", "WMT14's translation of news", "path= or lmgym[data]"),
        "wmt16": Entry("lmgym.tasks.translation:wmt16", "WMT16's translation of news", "path= or lmgym[data]"),
        "iwslt2017": Entry("lmgym.tasks.translation:iwslt2017", "translation of talks", "path= or lmgym[data]"),
        "multi30k": Entry(
            "lmgym.tasks.translation:multi30k",
            "translation of captions of pictures",
            "path= or lmgym[data]",
        ),
        "daily_dialog": Entry(
            "lmgym.tasks.dialogue:daily_dialog",
            "the next utterance of everyday dialogues",
            "path= or lmgym[data]",
        ),
        "crd3": Entry("lmgym.tasks.dialogue:crd3", "the next turn of a role-playing game", "path="),
    },
    "reward": {
        "final_answer": Entry(
            "lmgym.rewards.maths.final_answer:final_answer", "1 if the final answer equals the reference's"
        ),
        "math_equal": Entry(
            "lmgym.rewards.maths.math_equal:math_equal",
            "1 if the final answer equals the reference's as mathematics",
            "lmgym[maths]",
        ),
        "reasoning_gym": Entry(
            "lmgym.rewards.reasoning_gym:reasoning_gym", "the library's own score of its puzzles", "lmgym[reasoning]"
        ),
        "answer_format": Entry(
            "lmgym.rewards.maths.final_answer:answer_format", "1 if the text announces its final answer"
        ),
        "lexical_richness": Entry(
            "lmgym.rewards.text.form:lexical_richness", "type-token ratio less a penalty for brevity"
        ),
        "type_token_ratio": Entry("lmgym.rewards.text.form:type_token_ratio", "distinct words over words"),
        "length": Entry("lmgym.rewards.text.form:length", "1 at the target number of words, falling off linearly"),
        "words": Entry("lmgym.rewards.text.form:words", "number of words (a metric)"),
        "regex": Entry("lmgym.rewards.text.form:regex", "1 where a regular expression matches"),
        "exact_match": Entry("lmgym.rewards.text.form:exact_match", "1 if the text is one of the references"),
        "overlong": Entry(
            "lmgym.rewards.text.form:overlong", "0, falling to -1 over the last tokens before a limit (DAPO)"
        ),
        "increasing_numbers": Entry(
            "lmgym.rewards.text.synthetic:increasing_numbers", "share of numbers in increasing order"
        ),
        "dates": Entry("lmgym.rewards.text.synthetic:dates", "1 if a date such as 2021-03-04 occurs"),
        "bleu": Entry("lmgym.rewards.text.bleu:bleu", "BLEU of white-space tokens, not smoothed", "lmgym[metrics]"),
        "sacre_bleu": Entry("lmgym.rewards.text.bleu:sacre_bleu", "BLEU as sacrebleu computes it", "lmgym[metrics]"),
        "ter": Entry("lmgym.rewards.text.bleu:ter", "1 - translation edit rate", "lmgym[metrics]"),
        "chrf": Entry("lmgym.rewards.text.chrf:chrf", "F-score of character n-grams"),
        "chrf_plus_plus": Entry("lmgym.rewards.text.chrf:chrf_plus_plus", "chrF that counts words and pairs too"),
        "rouge1": Entry("lmgym.rewards.text.rouge:rouge1", "F1 of words in common", "lmgym[metrics]"),
        "rouge2": Entry("lmgym.rewards.text.rouge:rouge2", "F1 of pairs of words in common", "lmgym[metrics]"),
        "rougeL": Entry("lmgym.rewards.text.rouge:rougeL", "F1 of the longest common subsequence", "lmgym[metrics]"),
        "rougeLsum": Entry(
            "lmgym.rewards.text.rouge:rougeLsum", "ROUGE-L of summaries, line by line", "lmgym[metrics]"
        ),
        "rouge_combined": Entry(
            "lmgym.rewards.text.rouge:rouge_combined", "mean of ROUGE-1, -2 and -L", "lmgym[metrics]"
        ),
        "rouge_l_max": Entry(
            "lmgym.rewards.text.rouge:rouge_l_max", "best ROUGE-L over the references", "lmgym[metrics]"
        ),
        "meteor": Entry(
            "lmgym.rewards.text.meteor:meteor",
            "METEOR: equal words, stems and synonyms",
            "lmgym[metrics], WordNet for NLTK",
            substitute="meteor_stem",
        ),
        "meteor_stem": Entry("lmgym.rewards.text.meteor:meteor_stem", "METEOR without synonyms", "lmgym[metrics]"),
        "cider": Entry("lmgym.rewards.text.cider:cider", "CIDEr-D: n-grams in common, rare ones count for more"),
        "spice": Entry(
            "lmgym.rewards.text.spice:spice", "scene graphs in common, by SPICE's program", "Java, SPICE's jar"
        ),
        "spider": Entry("lmgym.rewards.text.spice:spider", "SPICE and CIDEr, weighted", "Java, SPICE's jar"),
        "parent": Entry(
            "lmgym.rewards.text.parent:parent", "PARENT: n-grams held against references and table", "lmgym[metrics]"
        ),
        "parent_overlap": Entry(
            "lmgym.rewards.text.totto:parent_overlap", "parent on ToTTo's overlap subset", "lmgym[metrics]"
        ),
        "parent_non_overlap": Entry(
            "lmgym.rewards.text.totto:parent_non_overlap", "parent on the rest of ToTTo", "lmgym[metrics]"
        ),
        "totto_bleu": Entry("lmgym.rewards.text.totto:totto_bleu", "BLEU in lower case", "lmgym[metrics]"),
        "totto_bleu_overlap": Entry(
            "lmgym.rewards.text.totto:totto_bleu_overlap", "totto_bleu on ToTTo's overlap subset", "lmgym[metrics]"
        ),
        "totto_bleu_non_overlap": Entry(
            "lmgym.rewards.text.totto:totto_bleu_non_overlap", "totto_bleu on the rest of ToTTo", "lmgym[metrics]"
        ),
        "common_gen_repeat_penalty": Entry(
            "lmgym.rewards.text.common_gen:common_gen_repeat_penalty", "-1 if the question is repeated"
        ),
        "concept_coverage": Entry(
            "lmgym.rewards.text.common_gen:concept_coverage", "share of the concepts that are used", "lmgym[metrics]"
        ),
        "common_gen_preference": Entry(
            "lmgym.rewards.text.common_gen:common_gen_preference",
            "METEOR and a preference, less for missing concepts",
            "lmgym[metrics], WordNet for NLTK, a preference",
        ),
        "squad_exact_match": Entry(
            "lmgym.rewards.text.squad:squad_exact_match", "1 if the answer is right, as in SQuAD"
        ),
        "token_f1": Entry("lmgym.rewards.text.squad:token_f1", "F1 of the answer's words, as in SQuAD"),
        "vader": Entry(
            "lmgym.rewards.text.vader:vader", "sentiment by rated words and rules", "vaderSentiment or lexicon="
        ),
        "msttr": Entry("lmgym.rewards.text.diversity:msttr", "mean type-token ratio of segments of 100 words"),
        "prediction_length": Entry(
            "lmgym.rewards.text.diversity:prediction_length", "number of words and marks (a metric)"
        ),
        "distinct_1": Entry("lmgym.rewards.text.diversity:distinct_1", "different words over all"),
        "distinct_2": Entry("lmgym.rewards.text.diversity:distinct_2", "different pairs of words over all"),
        "distinct_3": Entry("lmgym.rewards.text.diversity:distinct_3", "different runs of three words over all"),
        "vocabulary_1": Entry("lmgym.rewards.text.diversity:vocabulary_1", "number of different words (a metric)"),
        "vocabulary_2": Entry(
            "lmgym.rewards.text.diversity:vocabulary_2", "number of different pairs of words (a metric)"
        ),
        "vocabulary_3": Entry(
            "lmgym.rewards.text.diversity:vocabulary_3", "number of different runs of three words (a metric)"
        ),
        "unique_1": Entry("lmgym.rewards.text.diversity:unique_1", "number of words that occur once (a metric)"),
        "unique_2": Entry(
            "lmgym.rewards.text.diversity:unique_2", "number of pairs of words that occur once (a metric)"
        ),
        "unique_3": Entry(
            "lmgym.rewards.text.diversity:unique_3", "number of runs of three words that occur once (a metric)"
        ),
        "entropy_1": Entry("lmgym.rewards.text.diversity:entropy_1", "entropy of the words, in bits"),
        "entropy_2": Entry("lmgym.rewards.text.diversity:entropy_2", "entropy of the pairs of words, in bits"),
        "entropy_3": Entry("lmgym.rewards.text.diversity:entropy_3", "entropy of the runs of three words, in bits"),
        "conditional_entropy_2": Entry(
            "lmgym.rewards.text.diversity:conditional_entropy_2", "entropy of a word given the one before, in bits"
        ),
        "conditional_entropy_3": Entry(
            "lmgym.rewards.text.diversity:conditional_entropy_3", "entropy of a word given the two before, in bits"
        ),
        "learned_reward": Entry(
            "lmgym.rewards.learned.classifier:learned_reward", "what a classifier says of one of its labels", "a model"
        ),
        "reward_model": Entry(
            "lmgym.rewards.learned.classifier:reward_model", "a reward model's score of prompt and answer", "a model"
        ),
        "intent_accuracy": Entry(
            "lmgym.rewards.learned.intent:intent_accuracy",
            "whether an utterance has the wanted intent, and METEOR",
            "a model, lmgym[metrics], WordNet for NLTK",
        ),
        "bert_score": Entry(
            "lmgym.rewards.learned.similarity:bert_score", "tokens' vectors held against the references'", "a model"
        ),
        "bleurt": Entry(
            "lmgym.rewards.learned.similarity:bleurt", "a trained regression on reference and text", "a model"
        ),
        "summac_zero_shot": Entry(
            "lmgym.rewards.learned.entailment:summac_zero_shot", "whether the document entails the summary", "a model"
        ),
        "summac_conv": Entry(
            "lmgym.rewards.learned.entailment:summac_conv", "the same, by a trained head", "a model and a head"
        ),
        "causal_perplexity": Entry(
            "lmgym.rewards.learned.perplexity:causal_perplexity", "perplexity of the text under a model", "a model"
        ),
        "judge_score": Entry("lmgym.rewards.learned.judge:judge_score", "a judge's expected score", "a model"),
        "judge_yes_no": Entry(
            "lmgym.rewards.learned.judge:judge_yes_no", "a judge's P(yes), mean over questions", "a model"
        ),
        "endpoint_judge": Entry(
            "lmgym.rewards.learned.endpoint:endpoint_judge", "score or yes by a chat endpoint", "an endpoint"
        ),
    },
    "post_processor": {
        "three_sentence_summary": Entry(
            "lmgym.rewards.text.post_processing:three_sentence_summary",
            "the first three sentences, a line each",
        ),
    },
    "env": {
        "single_turn": Entry("lmgym.envs.single_turn:SingleTurn", "one prompt, one answer"),
        "guess_number": Entry("lmgym.envs.games:GuessNumber", "find a secret number by higher and lower"),
        "tic_tac_toe": Entry("lmgym.envs.games:TicTacToe", "three in a row, against oneself, a frozen copy or chance"),
        "conversation": Entry(
            "lmgym.envs.conversation:Conversation", "several turns, with tools and with a user who answers"
        ),
        "gymnasium": Entry(
            "lmgym.envs.gymnasium:Gymnasium", "any environment of gymnasium, put into words by an agent"
        ),
        "textarena": Entry(
            "lmgym.envs.textarena:TextArena", "TextArena's games, for one player or several", "lmgym[textarena]"
        ),
        "textworld": Entry(
            "lmgym.envs.textworld:TextWorld", "a game of TextWorld, explored by typed commands", "textworld, game="
        ),
        "stepwise": Entry(
            "lmgym.envs.stepwise:StepwiseEnv", "an action is a line of reasoning; with or without a calculator"
        ),
    },
    "tool": {
        "python": Entry(
            "lmgym.envs.tools.sandbox.runner:python", "runs Python code in a process of its own, within limits", "Linux"
        ),
        "calculator": Entry("lmgym.envs.tools.schema:calculator", "computes an arithmetic expression exactly"),
    },
    "agent": {
        "plain": Entry("lmgym.envs.agent:Plain", "numbers in, an action's number out; plays any gymnasium environment"),
        "blackjack": Entry("lmgym.envs.agent:Blackjack", "Blackjack-v1 in words"),
        "grid": Entry("lmgym.envs.agent:Grid", "FrozenLake-v1 and CliffWalking-v1 in words"),
    },
    "driver": {
        "first_order": Entry(
            "lmgym.updates.first_order:first_order", "optimizer steps over epochs of minibatches (the usual one)"
        ),
        "trust_region": Entry(
            "lmgym.updates.trust_region:trust_region", "a natural-gradient step with a line search, then the critic"
        ),
    },
    "engine": {
        "sampler": Entry("lmgym.inference.sampler:Sampler", "lmgym's own batched sampler, in the training process"),
    },
}
