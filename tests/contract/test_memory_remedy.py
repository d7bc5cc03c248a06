"""What `lmgym check` says of a recipe that does not fit: the first change by which it would, tried by the estimate."""

from pathlib import Path

from lmgym.config.build import load_config
from lmgym.config.schema import Config
from lmgym.training.planning.memory_remedy import remedy_sentence
from tests import runs

GIB = 2**30


def needs(config: Config) -> float:
    """A recipe of 2 GiB, and what its passes and rows add."""
    each = 0.5 if config.policy.activation_checkpointing else 1.0
    return GIB * (2 + each * (config.policy.tokens_per_forward or 4096) / 1024 + config.engine.rows / 128)


def test_the_cheapest_change_that_fits_is_named(tmp_path: Path) -> None:
    config = load_config(runs.write(tmp_path / "recipe.yaml", engine={"rows": 256}))

    def said(here: float) -> str:
        return remedy_sentence(config, 4096, needs(config), here * GIB, needs)

    assert said(7) == "does not fit: 8.00 GiB of 7.00 GiB here; policy.tokens_per_forward: 2048 would need 6.00 GiB"
    assert said(4.3).endswith("; policy.tokens_per_forward: 256 would need 4.25 GiB")
    assert said(3).endswith("; policy.tokens_per_forward: 256 with engine.rows: 64 would need 2.75 GiB")
    whole = "policy.tokens_per_forward: 256 with engine.rows: 8 and policy.activation_checkpointing: true"
    assert said(2.2).endswith(f"; {whole} would need 2.19 GiB")
    assert f"of 1.00 GiB here; even {whole} would need 2.19 GiB; lower policy.tokens_per_forward" in said(1)
