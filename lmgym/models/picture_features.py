"""Features of pictures, and the inputs of a language model in which they stand.

While the vision tower is frozen, they are computed once, in the precision of the parameters, and serve sampling,
scoring, references and evaluations alike. If it trains, a pass with gradient computes them as a part of itself, all its
pictures together, and others once for each state of the weights. What is kept is computed for each picture alone: it is
a function of picture and weights, whatever else is in a pass, so that a resumed run finds the same bits."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lmgym.core.errors import LmgymError
from lmgym.models.vision import (
    Family,
    family_of,
    joined,
    language_of,
    picture_tokens,
    placeholder_of,
    processed,
    vision_names,
)
from lmgym.pictures.ids import FIRST, PREFIX, picture_of

FEATURES, PIXELS = 2**30, 2**28  # bytes that stay from one pass to the next


class Pictures(Protocol):
    """Where pictures come from (pictures/store.py)."""

    def open(self, prefix: str) -> Any:
        """The picture (Pillow, RGB) whose sha256 begins with these hexadecimal digits."""


class Recent:
    """Values by name, the least recently used of which go when all take more than `most` bytes.
    Example: Recent(2**30).put("0123456789", features, features.nbytes)"""

    def __init__(self, most: int) -> None:
        self.most, self.total, self._kept = most, 0, dict[Any, tuple[Any, int]]()

    def get(self, name: Any) -> Any:
        """What is kept under a name; None if nothing is."""
        if name not in self._kept:
            return None
        self._kept[name] = self._kept.pop(name)  # now the last that goes
        return self._kept[name][0]

    def put(self, name: Any, value: Any, size: int) -> None:
        """Keep a value of `size` bytes under a new name."""
        self._kept[name] = value, size
        self.total += size
        while self.total > self.most and len(self._kept) > 1:
            self.total -= self._kept.pop(next(iter(self._kept)))[1]

    def clear(self) -> None:
        self._kept.clear()
        self.total = 0


class PictureReader:
    """A model's processor, and the pictures that it reads. All copies of a policy share one.
    Example: policy.vision.reader.pictures = PictureStore(folder)"""

    def __init__(self, processor: Any, family: Family, pictures: Pictures | None = None) -> None:
        self.processor, self.family, self.pictures = processor, family, pictures
        self._own: dict[str, Any] = {}  # pictures that lmgym has made itself, to try a model
        self._pixels, self._grids = Recent(PIXELS), dict[str, tuple[int, int]]()
        processor.lmgym_keep = self.keep  # called by `picture_tokens`

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which makes pixels itself."""
        return {**vars(self), "_pixels": Recent(PIXELS), "_grids": {}}

    def keep(self, digest: str, found: tuple[list[int], dict[str, Tensor]]) -> None:
        """Keep what `processed` has made of a picture, while there is room."""
        if self._pixels.get(digest[:PREFIX]) is None:
            self._pixels.put(digest[:PREFIX], found, sum(one.nbytes for one in found[1].values()))

    def tokens_of(self, digest: str, image: Any) -> list[int]:
        """The ids that stand for a picture that no folder holds."""
        self._own[digest[:PREFIX]] = image
        return picture_tokens(self.processor, digest, image)

    def pixels(self, prefix: str) -> dict[str, Tensor]:
        """The pixel inputs of the picture whose sha256 begins so. Raises LmgymError if there is no folder of them."""
        return self._processed(prefix)[1]

    def count(self, prefix: str) -> int:
        """How many pieces a picture has."""
        return self._processed(prefix)[0].count(placeholder_of(self.processor))

    def tokens(self, prefix: str) -> list[int]:
        """The ids that the processor writes for a picture: marks, and its placeholder for each piece."""
        return self._processed(prefix)[0]

    def image(self, prefix: str) -> Any:
        """The picture itself (Pillow, RGB)."""
        image = self._own.get(prefix)
        if image is None and self.pictures is None:
            raise LmgymError(
                f"a prompt holds the picture {prefix}, and the policy was given no folder of pictures "
                "(policy.vision.reader.pictures)"
            )
        return image if image is not None else self.pictures.open(prefix)  # type: ignore[union-attr]

    def _processed(self, prefix: str) -> tuple[list[int], dict[str, Tensor]]:
        found: tuple[list[int], dict[str, Tensor]] | None = self._pixels.get(prefix)
        if found is None:
            found = processed(self.processor, self.image(prefix))
            self.keep(prefix, found)
        return found

    def grid(self, prefix: str) -> tuple[int, int]:
        """The rows and columns of a picture's pieces, where a piece has a place in it (M-RoPE)."""
        if prefix not in self._grids:
            _, rows, columns = self.pixels(prefix)["image_grid_thw"][0].tolist()
            merged = int(self.processor.image_processor.merge_size)
            self._grids[prefix] = rows // merged, columns // merged
        return self._grids[prefix]


class Vision:
    """What a policy knows of pictures: `reader`, the `model` whose vision tower makes the features, and whether that
    `trains`. Example: policy.vision.embed(policy.model, ids)"""

    def __init__(self, model: PreTrainedModel, reader: PictureReader, trains: bool) -> None:
        self.model, self.reader, self.trains = model, reader, trains
        self.placeholder = placeholder_of(reader.processor)
        self.device = model.device
        self._features, self._made_of = Recent(FEATURES), list[Any]()

    @classmethod
    def of(cls, model: PreTrainedModel, processor: Any, trains: bool) -> "Vision":
        """The vision of a model that has been loaded with its processor."""
        family = family_of(model.config)
        assert family is not None
        return cls(model, PictureReader(processor, family), trains)

    @property
    def processor(self) -> Any:
        """transformers' processor of pictures and texts."""
        return self.reader.processor

    @property
    def family(self) -> Family:
        return self.reader.family

    def beside(self, model: PreTrainedModel) -> "Vision":
        """The vision of a copy of the model: the same while the vision tower is frozen."""
        return self.of_model(model) if self.trains else self

    def of_model(self, model: PreTrainedModel) -> "Vision":
        """What this model's own tower sees, with the same reader."""
        return Vision(model, self.reader, self.trains)

    def features(self, model: PreTrainedModel, pictures: Sequence[str]) -> list[Float[Tensor, "n W"]]:
        """The features of each of these pictures, one for each of its pieces. With gradient if the tower trains and
        gradients are on; else kept."""
        if self.trains and torch.is_grad_enabled():
            counts = list(map(self.reader.count, pictures))
            return list(self._computed(model, pictures).split(counts))
        if self.trains:
            self._forget_old(model)
        return [self._kept(model, picture) for picture in pictures]

    def _kept(self, model: PreTrainedModel, picture: str) -> Float[Tensor, "n W"]:
        found: Tensor | None = self._features.get(picture)
        if found is None:
            with torch.no_grad(), nullcontext() if self.trains else self._precise():
                found = self._computed(model if self.trains else self.model, [picture])
            self._features.put(picture, found, found.nbytes)
        return found

    def read(self, model: PreTrainedModel, ids: Int[Tensor, "B L"]) -> dict[str, Any]:
        """The arguments of the model's forward pass, or of its trunk's, for ids with pieces of pictures among them."""
        pieces = ids >= FIRST
        if self.family.deep:  # the model itself puts them where they belong
            first, *others = self.vectors(model, ids).split(language_of(model).config.hidden_size, -1)
            image = SimpleNamespace(pooler_output=[first], deepstack_features=[[one] for one in others])
            return {"input_ids": ids.masked_fill(pieces, self.placeholder), "mm_encoder_outputs": {"image": image}}
        types = {self.family.types: pieces.long()} if self.family.plain_because else {}
        return {"inputs_embeds": self.embed(model, ids), **types}

    def embed(self, model: PreTrainedModel, ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L H"]:
        """The inputs of the language model: words from the model's own table, pieces from the features of their
        pictures."""
        pieces = ids >= FIRST
        words: Tensor = model.get_input_embeddings()(ids.masked_fill(pieces, 0))  # type: ignore[no-untyped-call]
        return words.masked_scatter(pieces[:, :, None], self.vectors(model, ids).to(words.dtype))

    def vectors(self, model: PreTrainedModel, ids: Int[Tensor, "B L"]) -> Float[Tensor, "n W"]:
        """The features of the pieces among these ids, in their order; with DeepStack those for all layers side by side.
        Raises LmgymError for a piece that a picture does not have in this model."""
        pieces = ids >= FIRST
        # 1. The pictures whose pieces these are, and which one each piece is of.
        found = ids[pieces]
        firsts, picture = (found & ~0xFFFF).unique(return_inverse=True)
        names = [picture_of(first)[0] for first in firsts.tolist()]
        features = self.features(model, names)
        # 2. Each piece's place among the features of all of them.
        counts = torch.tensor([len(one) for one in features], device=ids.device)
        number = found & 0xFFFF
        if bool((number >= counts[picture]).any()):
            wrong = int((number >= counts[picture]).nonzero()[0, 0])
            raise LmgymError(
                f"a prompt holds piece {int(number[wrong]) + 1} of the picture {names[int(picture[wrong])]}, which has "
                f"{int(counts[picture[wrong]])} in this model; make its ids with this model's processor"
            )
        return torch.cat(features)[(counts.cumsum(0) - counts)[picture] + number]

    def places(self, ids: Int[Tensor, "N T"]) -> Int[Tensor, "3 N T"] | None:
        """The positions of the tokens of whole rows with M-RoPE: time, row and column. A text goes on behind a picture
        as if that had as many tokens as its longer side, and a piece adds its row and its column in the picture. None
        if each token's position is simply its index in its row. Padding, if any, is on the right."""
        pieces = ids >= FIRST
        if not self.family.grid or not bool(pieces.any()):
            return None
        # 1. Rows and columns of the picture that a piece is of.
        firsts, picture = (ids[pieces] & ~0xFFFF).unique(return_inverse=True)
        grids = [self.reader.grid(picture_of(first)[0]) for first in firsts.tolist()]
        rows, columns = torch.tensor(grids, device=ids.device)[picture].unbind(1)
        number = ids[pieces] & 0xFFFF
        # 2. How far each token moves what comes behind it: a word by one, of a picture the last piece alone.
        moves = (~pieces).long()
        moves[pieces] = torch.where(number == rows * columns - 1, torch.maximum(rows, columns), 0)
        begins = moves.cumsum(1) - moves
        # 3. Time, row and column.
        places = torch.stack([begins, begins, begins])
        places[1][pieces] += number // columns
        places[2][pieces] += number % columns
        return places

    def own_inputs(self, ids: Int[Tensor, "1 L"]) -> dict[str, Tensor]:
        """The arguments of the model's own forward pass for one row, as Hugging Face's documentation gives them:
        placeholders and pixels. Without a picture, the ids alone."""
        pieces = ids >= FIRST
        if not bool(pieces.any()):
            return {"input_ids": ids}
        starts = ids[pieces & ((ids & 0xFFFF) == 0)].tolist()
        pixels = joined([self.reader.pixels(picture_of(start)[0]) for start in starts])
        inputs = {name: value.to(ids.device) for name, value in pixels.items()}
        types = {self.family.types: pieces.long()} if self.family.types else {}
        return {"input_ids": ids.masked_fill(pieces, self.placeholder), **inputs, **types}

    def _computed(self, model: Any, pictures: Sequence[str]) -> Float[Tensor, "n W"]:
        """The features of some pictures, one behind the other, by one pass of the tower."""
        pixels = joined([self.reader.pixels(picture) for picture in pictures])
        found = model.get_image_features(
            **{name: value.to(self.device) for name, value in pixels.items()}, return_dict=True
        )
        layers: list[Sequence[Tensor]] = [found.pooler_output, *(found.deepstack_features if self.family.deep else ())]
        rows = [torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]) for parts in layers]
        return torch.cat(rows, -1)

    def _precise(self) -> AbstractContextManager[Any]:
        """The precision of the parameters, whatever that of the pass is."""
        return torch.autocast(self.device.type, enabled=False)

    def _forget_old(self, model: PreTrainedModel) -> None:
        """Drop features of other weights: of another model, of before an update, or with adapters switched off."""
        parameters = dict(model.named_parameters())
        own = [parameters[name] for name in vision_names(model)]
        switches = [bool(module.disable_adapters) for module in model.modules() if hasattr(module, "disable_adapters")]
        autocast = torch.is_autocast_enabled(self.device.type)
        now = [autocast, switches, *((one.data_ptr(), one._version) for one in own)]
        if now != self._made_of:
            self._features.clear()
            self._made_of = now


def any_piece(ids: Int[Tensor, "..."]) -> bool:
    """True if one of the ids is a piece of a picture."""
    return bool((ids >= FIRST).any())
