"""`lmgym serve`: a model behind the endpoint at which programs ask the policy in training."""

from collections.abc import Callable, Mapping, Sequence

from lmgym.core.errors import LmgymError
from lmgym.experiments.named_models import NamedModel
from lmgym.gateway.server import Gateway, addresses
from lmgym.gateway.session import Mailbox
from lmgym.gateway.wire import SAMPLING
from lmgym.rollouts.serving import Serving
from lmgym.training.setup import actor_of


def serve_model(named: NamedModel, port: int, ignored: Sequence[str], say: Callable[[Mapping[str, str]], None]) -> None:
    """Answer programs until Ctrl-C, as the recipe's evaluation decodes. `say` gets the variables that clients read.
    Raises LmgymError for a port that is taken, and for an ignored field that there is not.

    Example: serve_model(find_model("runs/quickstart"), 8643, ["temperature"], print)"""
    if unknown := [name for name in ignored if name not in SAMPLING]:
        raise LmgymError(f"--ignored may name {', '.join(SAMPLING)}, not '{unknown[0]}'")
    config = named.config
    stage, mailbox = config.stages[-1], Mailbox[None]()
    gateway = Gateway(port)  # before the model is loaded, which takes longer
    actor = actor_of(config, named.load())
    decoding = config.evaluation.decoding(stage.sampling)
    serving = Serving(actor, decoding, config.seed, str(stage.env.get("tool_prompt", "template")))
    address, key = gateway.open(mailbox, tuple(ignored))
    try:
        say(addresses(address, key))
        serving.run(mailbox)
    finally:
        mailbox.end(None)
        gateway.close(address)
