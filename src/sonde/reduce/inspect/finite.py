"""Checks whether tensors are finite, in two stages: all of them are read only if the last ones are not finite.

On the host the first stage is known at once. On a GPU the second is launched in any case, and reads nothing if the
first, whose result stays on the device, found nothing: nothing waits. Other devices have no such kernel: there some
tensors are summed, different ones in each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from sonde.reduce.dense import is_dense
from sonde.reduce.gpu.availability import finds_nonfinite
from sonde.reduce.transfer import HostTransfer

State = float | None
"""NaN or infinity if the tensor contains one, 0.0 if it is finite, None if that is not known."""
Placed = tuple[int, Tensor]
END_BYTES: Final = {"cpu": 4 << 20, "cuda": 96 << 20}
"""Larger tensors are read in part by the first stage."""
NUM_ENDS: Final = 2
"""Tensors that the first stage reads in addition to the model's outputs: an output of many values may be read in part,
and one of few values need not depend on all that came before."""
AT_ONCE_BYTES: Final = 8 << 20
"""Tensors on a GPU that are smaller than this together are read in a single stage."""
SUMMED_BYTES: Final = 32 << 20
"""On other devices: how much is summed of one pass."""
ROW_STRIDE: Final = 8
_NUM_EXTRA: Final = 256
_NAN: Final = 2
_READABLE: Final = frozenset(
    getattr(torch, name)
    for name in [
        "float64",
        "float32",
        "bfloat16",
        "float16",
        "complex32",
        "complex64",
        "complex128",
        "float8_e5m2",
        "float8_e4m3fn",
        "float8_e5m2fnuz",
        "float8_e4m3fnuz",
    ]
    if hasattr(torch, name)
)


def is_readable(tensor: Tensor) -> bool:
    """Whether its dtype is known, and its elements are in one piece of memory, in whatever order."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    if tensor.dtype not in _READABLE or not tensor.numel():
        return False
    return (
        tensor.is_contiguous()
        or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        or is_dense(tensor)
    )


def _real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.dtype.itemsize > 1 else tensor.to(torch.float32)


def total(tensor: Tensor) -> Tensor:
    """A number that is finite if the tensor is. A sum of huge but finite float32 numbers may overflow."""
    tensor = _real(tensor)
    return tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def state_of(tensor: Tensor) -> State:
    tensor = _real(tensor)
    if math.isfinite(float(total(tensor))):
        return 0.0
    if bool(tensor.isnan().any()):
        return math.nan
    return math.inf if bool(tensor.isinf().any()) else 0.0


def sample(tensor: Tensor, limit: int, step: int) -> Tensor:
    """Rows along the last dimension with about `limit` bytes in total; different ones in each step."""
    if tensor.nbytes <= limit or tensor.dim() < 2 or not tensor.is_contiguous():
        return tensor
    rows = tensor.view(-1, tensor.shape[-1])
    apart = min(-(-tensor.nbytes // limit), len(rows))
    return rows[step % apart :: apart]


class Scan:
    """The states of some tensors, which may still be on a device; `send` copies them to the host."""

    __slots__ = ("_codes", "_known", "_needed", "_num_extra", "_places", "_totals", "num")

    def __init__(self, num: int) -> None:
        self.num = num
        self._known: dict[int, State] = {}
        self._codes: list[Tensor] = []
        self._places: list[list[int]] = []
        """For each tensor of codes: the tensors that they describe, or -1."""
        self._totals: list[tuple[int, Tensor]] = []
        self._needed: dict[torch.device, Tensor] = {}
        """By device: its first number is not 0 if something was found."""
        self._num_extra: dict[torch.device, int] = {}

    def read_on_host(self, found: Iterable[Placed]) -> None:
        for place, tensor in found:
            self._known[place] = state_of(tensor)

    def read_on_gpu(self, found: Sequence[Placed], ends: Sequence[Tensor], *, is_bad: bool) -> None:
        """Launch both stages on one device; only the second if it is known to be needed, or if it reads little."""
        from sonde.reduce.gpu.triton_finite import find, new_codes, row_of

        device = found[0][1].device
        known = [(place, row) for place, tensor in found if (row := row_of(tensor)) is not None]
        rows = [row for _, row in known]
        is_at_once = is_bad or sum(row[1] * row[2] for row in rows) <= AT_ONCE_BYTES
        codes = new_codes(len(rows) + len(ends), device)
        if not is_at_once:
            limit = END_BYTES["cuda"]
            first = [row_of(tensor, -(-tensor.nbytes // limit)) for tensor in ends]
            find([row for row in first if row is not None], codes, first=len(rows) + 1)
            for earlier in self._needed.values():  # found on another device
                codes[:1] = torch.maximum(codes[:1], earlier[:1].to(device, non_blocking=True))
        find(rows, codes, needed=None if is_at_once else codes)
        self._needed[device] = codes
        self._codes.append(codes)
        self._places.append([-1, *(place for place, _ in known)])

    def sum_on_device(self, found: Sequence[Placed], step: int) -> None:
        """Sum the last tensors and as many others as fit, starting with a different one in each step."""
        left = SUMMED_BYTES
        last, others = found[-NUM_ENDS:], found[:-NUM_ENDS]
        start = step % max(len(others), 1)
        for place, tensor in [*last, *others[start:], *others[:start]]:
            part = sample(tensor, tensor.nbytes // ROW_STRIDE + 1, step)
            if part.nbytes <= left:
                left -= part.nbytes
                self._totals.append((place, total(part)))

    def add(self, tensor: Tensor) -> int | None:
        """Read one more tensor now, under the same condition. Returns its place among the states; None if it is not
        read."""
        if not is_readable(tensor):
            return None
        place = self.num
        if tensor.is_cpu:
            self._known[place] = state_of(tensor)
        elif tensor.device not in self._needed or not self._add_on_gpu(tensor, place):
            return None
        self.num += 1
        return place

    def _add_on_gpu(self, tensor: Tensor, place: int) -> bool:
        from sonde.reduce.gpu.triton_finite import find_one, new_codes

        device = tensor.device
        num = self._num_extra.get(device, 0)
        if num % _NUM_EXTRA == 0:
            self._codes.append(new_codes(_NUM_EXTRA, device))
            self._places.append([-1])
        at = max(at for at, codes in enumerate(self._codes) if codes.device == device)
        if not find_one(tensor, self._codes[at], len(self._places[at]), needed=self._needed[device]):
            return False
        self._places[at].append(place)
        self._num_extra[device] = num + 1
        return True

    def pieces(self) -> list[Tensor]:
        """Numbers to be copied to the host."""
        return [*self._codes, *(number.reshape(1) for _, number in self._totals)]

    def states(self, numbers: Sequence[Any]) -> list[State]:
        """The states, given the numbers of each of the pieces."""
        found = dict(self._known)
        for places, codes in zip(self._places, numbers, strict=False):
            for place, code in zip(places, codes, strict=False):
                found[place] = 0.0 if code == 0 else math.nan if code >= _NAN else math.inf
        for (place, _), number in zip(self._totals, numbers[len(self._codes) :], strict=True):
            value = float(number[0])
            found[place] = 0.0 if math.isfinite(value) else abs(value)
        return [found.get(place) for place in range(self.num)]


def scan(tensors: Sequence[Tensor | None], last: Sequence[int], outputs: Sequence[int], step: int) -> Scan | None:
    """The states of tensors in forward order; None is a tensor that is gone. If those at `last` and the last of the
    `outputs` are finite, so are the others, as far as it matters: then the result is None, or says so later."""
    groups: dict[torch.device, list[Placed]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None and is_readable(tensor):
            groups.setdefault(tensor.device, []).append((place, tensor))
    on_host = groups.pop(torch.device("cpu"), [])
    ends = _ends(on_host, last, outputs)
    is_bad = not all(math.isfinite(float(total(sample(tensor, END_BYTES["cpu"], step)))) for _, tensor in ends)
    if not is_bad and not groups:
        return None
    found = Scan(len(tensors))
    # If nothing is bad on the host, something may still be on a device, which is not known yet.
    found.read_on_host(on_host if is_bad else ends)
    for device, group in groups.items():
        if finds_nonfinite(device):
            found.read_on_gpu(group, [tensor for _, tensor in _ends(group, last, outputs)], is_bad=is_bad)
        else:
            found.sum_on_device(group, step)
    return found


def _ends(group: Sequence[Placed], last: Sequence[int], outputs: Sequence[int]) -> list[Placed]:
    """The tensors at `last`, and a few outputs of modules before them."""
    chosen, others = set(last), set(outputs)
    ends = [placed for placed in group if placed[0] in chosen]
    before = [placed for placed in group[-16 * (NUM_ENDS + len(chosen)) :] if placed[0] in others - chosen]
    return [*ends, *before[-NUM_ENDS:]]


def send(scans: Sequence[Scan]) -> Callable[[], list[list[State]]]:
    """Start copying to the host. The returned function waits: do not call it on the training thread."""
    pieces = [scan.pieces() for scan in scans]
    by_device: dict[torch.device, list[tuple[int, int]]] = {}
    for number, own in enumerate(pieces):
        for place, piece in enumerate(own):
            by_device.setdefault(piece.device, []).append((number, place))
    transfers = [
        (where, HostTransfer([pieces[number][place] for number, place in where])) for where in by_device.values()
    ]

    def resolve() -> list[list[State]]:
        numbers: list[list[Any]] = [[()] * len(own) for own in pieces]
        for where, transfer in transfers:
            for (number, place), values in zip(where, transfer.open(), strict=True):
                numbers[number][place] = values
        return [scan.states(own) for scan, own in zip(scans, numbers, strict=True)]

    return resolve
