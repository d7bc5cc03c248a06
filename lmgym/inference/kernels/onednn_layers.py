"""Linear layers with weights laid out for oneDNN, for decoding in fp32 on a CPU with `policy.products: onednn`.

oneDNN brings weights into its own order again in each product, which for the few rows of a decoding step takes as long
as the product itself. One order serves any number of rows, so it is made once for a call of the sampler. In bf16 the
same is done once after each update (models/kernels/onednn_linear.py), on a copy that only samples; here the layers also
train. Frozen ones stay as they are, so that the weights laid out take no more memory than the gradients of an update.
"""

from collections.abc import Callable

from torch import Tensor, nn

from lmgym.models.kernels import onednn_linear
from lmgym.models.kernels.onednn_products import weight_of
from lmgym.models.policy import Policy

PACK_AT_STEP = 8  # laying out takes as long as some twenty steps save


class OneDNNLinearLayers:
    """The linear layers of a policy whose products are oneDNN's. It has the methods of MKLLinearLayers."""

    def __init__(self, policy: Policy) -> None:
        encoder = set(policy.model.get_encoder().modules()) if policy.encoder_decoder else set()  # runs once a source
        modules = [layer for layer in policy.model.modules() if layer not in encoder]
        weights = [(layer, weight_of(layer)) for layer in modules]
        self.layers = [layer for layer, weight in weights if weight is not None and weight.requires_grad]
        self.usual: list[Callable[..., Tensor]] = []
        self.steps = 0

    def begin_step(self, rows: int) -> None:
        self.steps += 1
        if self.steps == PACK_AT_STEP:
            self.usual = [layer.forward for layer in self.layers]
            for layer in self.layers:
                layer.forward = _packed_forward(layer)  # type: ignore[method-assign]

    def release(self) -> None:
        """Drop the weights that are laid out; the layers have their usual `forward` again."""
        for layer, usual in zip(self.layers, self.usual, strict=False):
            layer.forward = usual  # type: ignore[method-assign]
        self.usual, self.steps = [], 0


def _packed_forward(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    weight = weight_of(layer)
    assert weight is not None
    packed, bias = onednn_linear.pack(weight.detach()), layer.bias
    return lambda hidden: onednn_linear.product(hidden, packed, bias)  # type: ignore[arg-type]
