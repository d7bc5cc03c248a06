"""The table of all built-in algorithms, tasks, rewards, environments, agents, tools, trackers and engines.

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


DATA, METRICS = "path= or lmgym[data]", "lmgym[metrics]"
GRPO = "algorithms.grpo.algorithm:GRPO"

# A row: its module in lmgym, or module:attribute if the attribute has another name than the row; the rest of its Entry.
_ROWS: dict[str, dict[str, tuple[str, ...]]] = {
    "algorithm": {
        "reinforce": ("algorithms.reinforce:Reinforce", "REINFORCE; baseline none, mean, ema or scst (greedy answer)"),
        "remax": ("algorithms.reinforce:Reinforce", "reinforce, preset: the greedy answer's score as baseline"),
        "rloo": ("algorithms.reinforce:RLOO", "REINFORCE whose baseline is the mean of the rest of the group"),
        "reinforce_pp": (
            "algorithms.reinforce_pp:ReinforcePlusPlus",
            "REINFORCE++: clipped ratio, advantages whitened globally",
        ),
        "reinforce_stable": (
            "algorithms.reinforce_stable:ReinforceStable",
            "returns per turn, clamped, and a KL to a reference that is refreshed",
        ),
        "grpo": (GRPO, "group-centred advantages, clipped ratio, token-sum loss"),
        "dr_grpo": (GRPO, "grpo, preset: sums over a constant, no scaling"),
        "dapo": (GRPO, "grpo, preset: dynamic sampling, higher upper clip, token mean"),
        "gspo": (GRPO, "grpo, preset: one clipped ratio for each answer"),
        "cispo": (GRPO, "grpo, preset: clipped weights, every token keeps its gradient"),
        "sapo": (GRPO, "grpo, preset: a soft gate in place of the clip"),
        "dppo": (GRPO, "grpo, preset: mask on changes of probability since sampling"),
        "icepop": (GRPO, "grpo, preset: tokens that the sampler saw too differently are left out"),
        "gspo_token": (GRPO, "grpo, preset: gspo's ratio, and each token its own gradient"),
        "gmpo": (GRPO, "grpo, preset: the geometric mean of clipped ratios"),
        "luspo": (GRPO, "grpo, preset: gspo, each answer weighed by its length"),
        "vespo": (GRPO, "grpo, preset: a smooth weight of the whole answer's ratio"),
        "ce_gppo": (GRPO, "grpo, preset: clipped tokens keep a bounded gradient"),
        "ipo_mask": (GRPO, "grpo, preset: dppo's mask on both sides"),
        "clip_cov": (GRPO, "grpo, preset: leaves out some tokens of large covariance"),
        "kl_cov": (GRPO, "grpo, preset: penalises the tokens of largest covariance"),
        "maxrl": (GRPO, "grpo, preset: over the group's mean, so that rare right answers count"),
        "gpg": (GRPO, "grpo, preset: plain policy gradient, made up for groups of equal scores"),
        "opo": (GRPO, "grpo, preset: baseline weighed by the answers' lengths"),
        "otb": (GRPO, "grpo, preset: a baseline for each token, weighed by squared gradients"),
        "pass_at_k": (GRPO, "grpo, preset: what an answer adds to the best of k"),
        "gfpo": (GRPO, "grpo, preset: the shortest answers of each group train"),
        "hgpo": (GRPO, "grpo, preset: turns with the same last texts, by how many of them"),
        "gigpo": (GRPO, "grpo, preset: turns that answered the same text are a group too"),
        "top_entropy": (GRPO, "grpo, preset: dapo on the fifth of the tokens of largest entropy"),
        "ppo": ("algorithms.actor_critic:PPO", "proximal policy optimisation with a value function"),
        "nlpo": ("algorithms.nlpo:NLPO", "PPO on the tokens that a mask policy finds likely"),
        "trpo": ("algorithms.trpo:TRPO", "natural-gradient step of a given divergence, with a line search"),
        "a2c": ("algorithms.actor_critic:A2C", "advantage actor-critic, one step per batch"),
        "raft": ("algorithms.raft:RAFT", "imitates the best answers of each group (expert iteration, ReST)"),
        "dpo": ("algorithms.dpo:DPO", "given pairs: the chosen answer above the rejected one, beside a reference"),
        "ipo": ("algorithms.dpo:DPO", "dpo, preset: a square loss, which stops at a margin"),
        "simpo": ("algorithms.dpo:DPO", "dpo, preset: means over tokens, no reference"),
        "orpo": ("algorithms.orpo:ORPO", "given pairs: imitates the chosen answer, and an odds ratio, in one stage"),
        "kto": ("algorithms.kto:KTO", "given answers that are good or bad alone, beside a reference"),
        "reward_model": ("algorithms.reward_model:RewardModel", "given pairs: a model that scores answers"),
        "process_reward_model": (
            "algorithms.process_reward_model:ProcessRewardModel",
            "given steps, right or wrong: a model that scores each step",
        ),
        "online_dpo": ("algorithms.online_dpo:OnlineDPO", "the best answer of a group against its worst; DPO's loss"),
        "distill": (
            "algorithms.distill:Distill",
            "learns from a teacher, on the student's own answers or on its texts",
        ),
        "gkd": ("algorithms.gkd:GKD", "learns a teacher's whole distributions, or its own with a hint in the prompt"),
        "replay": ("algorithms.replay:Replay", "grpo that also trains on weighted groups of earlier steps"),
        "supervised": ("algorithms.supervised:Supervised", "cross-entropy on the references (warm start)"),
    },
    "credit": {
        "group": ("algorithms.grpo.credit:GroupMean", "the score less the mean of its group, which may be scaled"),
        "mean_scaled": ("algorithms.grpo.credit:MeanScaled", "the same, divided by the mean: rare right answers count"),
        "length_weighted": ("algorithms.grpo.credit:LengthWeighted", "a baseline weighed by the answers' lengths"),
        "token_baseline": ("algorithms.grpo.credit:TokenBaseline", "a baseline for each token, by squared gradients"),
        "pass_at_k": ("algorithms.grpo.credit:PassAtK", "what an answer adds to the best of k"),
        "selected": ("algorithms.grpo.credit:Selected", "some answers of each group train, such as the shortest"),
        "each_reward": ("algorithms.grpo.credit:EachReward", "each reward scaled by itself, then summed"),
        "turns": ("algorithms.grpo.credit:Turns", "a turn against the turns that answered the same text"),
    },
    "surrogate": {
        "clip": ("algorithms.grpo.surrogate:Clip", "the smaller of ratio and clipped ratio, times the advantage"),
        "cispo": ("algorithms.grpo.surrogate:Cispo", "clipped weights: every token keeps its gradient"),
        "sapo": ("algorithms.grpo.surrogate:Sapo", "a gate that closes softly"),
        "dppo": ("algorithms.grpo.surrogate:Dppo", "leaves out tokens whose probability has moved too far"),
        "ipo_mask": ("algorithms.grpo.surrogate:IpoMask", "the same on both sides"),
        "gmpo": ("algorithms.grpo.surrogate:Gmpo", "the geometric mean of a row's clipped ratios"),
        "vespo": ("algorithms.grpo.surrogate:Vespo", "a smooth weight of the whole row's ratio"),
        "ce_gppo": ("algorithms.grpo.surrogate:CeGppo", "clipped tokens keep a bounded gradient"),
        "truncated_weight": ("algorithms.grpo.surrogate:TruncatedWeight", "the policy gradient times a bounded ratio"),
        "none": ("algorithms.grpo.surrogate:Unbounded", "ratio times advantage"),
    },
    "correction": {
        "none": ("algorithms.grpo.correction:Uncorrected", "the sampler is taken for the policy"),
        "truncated": ("algorithms.grpo.correction:Truncated", "importance weights, cut to their bounds"),
        "masked": ("algorithms.grpo.correction:Masked", "importance weights; beyond the bounds a token is left out"),
        "sampler": ("algorithms.grpo.correction:SamplerRatio", "the ratio compares with what the sampler said"),
    },
    "tokens": {
        "all": ("algorithms.grpo.tokens:AllTokens", "every token trains"),
        "top_entropy": ("algorithms.grpo.tokens:TopEntropy", "those of the largest entropy train"),
        "clip_cov": ("algorithms.grpo.tokens:ClipCov", "some of large covariance do not train"),
        "kl_cov": ("algorithms.grpo.tokens:KlCov", "those of the largest covariance are held back"),
    },
    "task": {
        "arithmetic": ("tasks.arithmetic", "generated word problems, difficulty as arguments"),
        "gsm8k": ("tasks.gsm8k", "grade-school maths, Hub or local file", DATA),
        "math": ("tasks.math", "competition mathematics, Hub or local file", DATA),
        "svamp": ("tasks.svamp", "one-step word problems, Hub or local file", DATA),
        "reasoning_gym": ("tasks.reasoning_gym", "generated puzzles, a hundred kinds by name", "lmgym[reasoning]"),
        "mixture": ("tasks.mixture", "several tasks as one, each with a weight"),
        "episodes": ("tasks.episodes", "numbered episodes, for environments that need no data"),
        "topics": ("tasks.topics", "open writing prompts without right answers"),
        "data": ("tasks.data", "any rows as prompts: parquet, arrow, jsonl, json, csv, tsv or the Hub", "path="),
        "jsonl": ("tasks.data:data", "an older name of data", "path="),
        "preferences": ("tasks.preferences", "pairs (chosen, rejected) or marked answers, file or Hub", "path="),
        "step_labels": ("tasks.step_labels", "answers in steps, each right or wrong, file or Hub", "path="),
        "increasing_numbers": ("tasks.synthetic", "a number to count on from, or one prompt"),
        "sentences_with_dates": ("tasks.synthetic", "beginnings of a sentence that ask for a date"),
        "dummy": ("tasks.synthetic", "one prompt again and again"),
        "imdb": ("tasks.sentiment", "the first half of film reviews, to be continued", DATA),
        "imdb_seq2seq": ("tasks.sentiment", "the same for supervised training of encoder-decoders", DATA),
        "common_gen": ("tasks.common_gen", "a sentence with given concepts, several references", DATA),
        "cnn_daily_mail": ("tasks.summarisation", "news articles and their highlights", DATA),
        "xsum": ("tasks.summarisation", "news articles in one sentence", DATA),
        "totto": ("tasks.tables", "a sentence about highlighted cells of a table", DATA),
        "dart": ("tasks.triples", "texts about sets of triples, from many sources", DATA),
        "web_nlg": ("tasks.triples", "texts about sets of Wikipedia's triples", DATA),
        "narrative_qa": ("tasks.narrative_qa", "questions about a summary, two answers each", DATA),
        "parallel": ("tasks.translation", "any text in two languages, files of lines or of rows", DATA),
        "wmt14": ("tasks.translation", "WMT14's translation of news", DATA),
        "wmt16": ("tasks.translation", "WMT16's translation of news", DATA),
        "iwslt2017": ("tasks.translation", "translation of talks", DATA),
        "multi30k": ("tasks.translation", "translation of captions of pictures", DATA),
        "daily_dialog": ("tasks.dialogue", "the next utterance of everyday dialogues", DATA),
        "crd3": ("tasks.dialogue", "the next turn of a role-playing game", "path="),
    },
    "reward": {
        "final_answer": ("rewards.maths.final_answer", "1 if the final answer equals the reference's"),
        "math_equal": (
            "rewards.maths.math_equal",
            "1 if the final answer equals the reference's as mathematics",
            "lmgym[maths]",
        ),
        "reasoning_gym": ("rewards.reasoning_gym", "the library's own score of its puzzles", "lmgym[reasoning]"),
        "answer_format": ("rewards.maths.final_answer", "1 if the text announces its final answer"),
        "lexical_richness": ("rewards.text.form", "type-token ratio less a penalty for brevity"),
        "type_token_ratio": ("rewards.text.form", "distinct words over words"),
        "length": ("rewards.text.form", "1 at the target number of words, falling off linearly"),
        "words": ("rewards.text.form", "number of words (a metric)"),
        "regex": ("rewards.text.form", "1 where a regular expression matches"),
        "exact_match": ("rewards.text.form", "1 if the text is one of the references"),
        "overlong": ("rewards.text.form", "0, falling to -1 over the last tokens before a limit (DAPO)"),
        "increasing_numbers": ("rewards.text.synthetic", "share of numbers in increasing order"),
        "dates": ("rewards.text.synthetic", "1 if a date such as 2021-03-04 occurs"),
        "bleu": ("rewards.text.bleu", "BLEU of white-space tokens, not smoothed", METRICS),
        "sacre_bleu": ("rewards.text.bleu", "BLEU as sacrebleu computes it", METRICS),
        "ter": ("rewards.text.bleu", "1 - translation edit rate", METRICS),
        "chrf": ("rewards.text.chrf", "F-score of character n-grams"),
        "chrf_plus_plus": ("rewards.text.chrf", "chrF that counts words and pairs too"),
        "rouge1": ("rewards.text.rouge", "F1 of words in common", METRICS),
        "rouge2": ("rewards.text.rouge", "F1 of pairs of words in common", METRICS),
        "rougeL": ("rewards.text.rouge", "F1 of the longest common subsequence", METRICS),
        "rougeLsum": ("rewards.text.rouge", "ROUGE-L of summaries, line by line", METRICS),
        "rouge_combined": ("rewards.text.rouge", "mean of ROUGE-1, -2 and -L", METRICS),
        "rouge_l_max": ("rewards.text.rouge", "best ROUGE-L over the references", METRICS),
        "meteor": (
            "rewards.text.meteor",
            "METEOR: equal words, stems and synonyms",
            "lmgym[metrics], WordNet for NLTK",
            "meteor_stem",
        ),
        "meteor_stem": ("rewards.text.meteor", "METEOR without synonyms", METRICS),
        "cider": ("rewards.text.cider", "CIDEr-D: n-grams in common, rare ones count for more"),
        "spice": ("rewards.text.spice", "scene graphs in common, by SPICE's program", "Java, SPICE's jar"),
        "spider": ("rewards.text.spice", "SPICE and CIDEr, weighted", "Java, SPICE's jar"),
        "parent": ("rewards.text.parent", "PARENT: n-grams compared with references and table", METRICS),
        "parent_overlap": ("rewards.text.totto", "parent on ToTTo's overlap subset", METRICS),
        "parent_non_overlap": ("rewards.text.totto", "parent on the rest of ToTTo", METRICS),
        "totto_bleu": ("rewards.text.totto", "BLEU in lower case", METRICS),
        "totto_bleu_overlap": ("rewards.text.totto", "totto_bleu on ToTTo's overlap subset", METRICS),
        "totto_bleu_non_overlap": ("rewards.text.totto", "totto_bleu on the rest of ToTTo", METRICS),
        "common_gen_repeat_penalty": ("rewards.text.common_gen", "-1 if the question is repeated"),
        "concept_coverage": ("rewards.text.common_gen", "share of the concepts that are used", METRICS),
        "common_gen_preference": (
            "rewards.text.common_gen",
            "METEOR and a preference, less for missing concepts",
            "lmgym[metrics], WordNet for NLTK, a preference",
        ),
        "squad_exact_match": ("rewards.text.squad", "1 if the answer is right, as in SQuAD"),
        "token_f1": ("rewards.text.squad", "F1 of the answer's words, as in SQuAD"),
        "vader": ("rewards.text.vader", "sentiment by rated words and rules", "vaderSentiment or lexicon="),
        "msttr": ("rewards.text.diversity", "mean type-token ratio of segments of 100 words"),
        "prediction_length": ("rewards.text.diversity", "number of words and marks (a metric)"),
        "distinct_1": ("rewards.text.diversity", "different words over all"),
        "distinct_2": ("rewards.text.diversity", "different pairs of words over all"),
        "distinct_3": ("rewards.text.diversity", "different runs of three words over all"),
        "vocabulary_1": ("rewards.text.diversity", "number of different words (a metric)"),
        "vocabulary_2": ("rewards.text.diversity", "number of different pairs of words (a metric)"),
        "vocabulary_3": ("rewards.text.diversity", "number of different runs of three words (a metric)"),
        "unique_1": ("rewards.text.diversity", "number of words that occur once (a metric)"),
        "unique_2": ("rewards.text.diversity", "number of pairs of words that occur once (a metric)"),
        "unique_3": ("rewards.text.diversity", "number of runs of three words that occur once (a metric)"),
        "entropy_1": ("rewards.text.diversity", "entropy of the words, in bits"),
        "entropy_2": ("rewards.text.diversity", "entropy of the pairs of words, in bits"),
        "entropy_3": ("rewards.text.diversity", "entropy of the runs of three words, in bits"),
        "conditional_entropy_2": ("rewards.text.diversity", "entropy of a word given the one before, in bits"),
        "conditional_entropy_3": ("rewards.text.diversity", "entropy of a word given the two before, in bits"),
        "learned_reward": ("rewards.learned.classifier", "what a classifier says of one of its labels", "a model"),
        "reward_model": ("rewards.learned.classifier", "a reward model's score of prompt and answer", "a model"),
        "process_reward_model": (
            "rewards.learned.process",
            "how likely the steps of an answer are right, as one number",
            "a model",
        ),
        "intent_accuracy": (
            "rewards.learned.intent",
            "whether an utterance has the wanted intent, and METEOR",
            "a model, lmgym[metrics], WordNet for NLTK",
        ),
        "bert_score": ("rewards.learned.similarity", "similarity of token vectors to the references'", "a model"),
        "bleurt": ("rewards.learned.similarity", "a trained regression on reference and text", "a model"),
        "summac_zero_shot": ("rewards.learned.entailment", "whether the document entails the summary", "a model"),
        "summac_conv": ("rewards.learned.entailment", "the same, by a trained head", "a model and a head"),
        "causal_perplexity": ("rewards.learned.perplexity", "perplexity of the text under a model", "a model"),
        "judge_score": ("rewards.learned.judge", "a judge's expected score", "a model"),
        "judge_yes_no": ("rewards.learned.judge", "a judge's P(yes), mean over questions", "a model"),
        "endpoint_judge": ("rewards.learned.endpoint", "score or yes by a chat endpoint", "an endpoint"),
    },
    "post_processor": {
        "three_sentence_summary": ("rewards.text.post_processing", "the first three sentences, a line each")
    },
    "env": {
        "single_turn": ("envs.single_turn:SingleTurn", "one prompt, one answer"),
        "guess_number": ("envs.games:GuessNumber", "find a secret number by higher and lower"),
        "tic_tac_toe": ("envs.games:TicTacToe", "three in a row, against oneself, a frozen copy or chance"),
        "conversation": ("envs.conversation:Conversation", "several turns, with tools and with a user who answers"),
        "gymnasium": ("envs.gymnasium:Gymnasium", "any environment of gymnasium, put into words by an agent"),
        "openenv": (
            "envs.openenv:OpenEnv",
            "an environment of OpenEnv: its class, or a server",
            "environment= or url=",
        ),
        "verifiers": ("envs.verifiers:Verifiers", "a taskset of verifiers with its own rewards", "lmgym[verifiers]"),
        "textarena": ("envs.textarena:TextArena", "TextArena's games, for one player or several", "lmgym[textarena]"),
        "textworld": (
            "envs.textworld:TextWorld",
            "a game of TextWorld, explored by typed commands",
            "textworld, game=",
        ),
        "stepwise": ("envs.stepwise:StepwiseEnv", "an action is a line of reasoning; with or without a calculator"),
    },
    "tool": {
        "python": ("envs.tools.sandbox.runner", "runs Python code in a process of its own, within limits", "Linux"),
        "calculator": ("envs.tools.schema", "computes an arithmetic expression exactly"),
    },
    "agent": {
        "plain": ("envs.agent:Plain", "numbers in, an action's number out; plays any gymnasium environment"),
        "blackjack": ("envs.agent:Blackjack", "Blackjack-v1 in words"),
        "fields": ("envs.openenv:Fields", "an observation's fields; an action's as JSON, or its only one (OpenEnv)"),
        "grid": ("envs.agent:Grid", "FrozenLake-v1 and CliffWalking-v1 in words"),
    },
    "driver": {
        "first_order": ("updates.first_order", "optimizer steps over epochs of minibatches (the usual one)"),
        "trust_region": ("updates.trust_region", "a natural-gradient step with a line search, then the critic"),
    },
    "sink": {
        "tensorboard": ("logs.sinks:Tensorboard", "event files in the run folder", "tensorboard"),
        "wandb": ("logs.sinks:Wandb", "a run on Weights & Biases, or offline files", "wandb"),
        "trackio": ("logs.sinks:Trackio", "a run of Trackio, on this machine or a Space", "trackio"),
    },
    "engine": {
        "sampler": ("inference.sampler:Sampler", "lmgym's own batched sampler, in the training process"),
        "vllm": ("inference.vllm.engine:VLLM", "vLLM, in this process or on servers, with a canary after each update"),
        "pool": ("inference.pool.ray_generators:RayGenerators", "the same in processes that Ray places", "lmgym[ray]"),
    },
}


def _entry(name: str, where: str, *rest: str) -> Entry:
    return Entry(f"lmgym.{where}" if ":" in where else f"lmgym.{where}:{name}", *rest)


BUILTIN = {kind: {name: _entry(name, *row) for name, row in rows.items()} for kind, rows in _ROWS.items()}
