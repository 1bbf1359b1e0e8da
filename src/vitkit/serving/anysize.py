"""Position tables of any grid inside an exported graph, as matrix products that every runtime has.

Runtimes disagree on how to resize: on the cubic's coefficient, on antialiasing, on the corners. A resize is
linear along rows and along columns, though, so it is written here as two small matrices, built in the graph
out of the size of the image, and nothing of it is left to the runtime.
"""

# H, W the table's own grid; h, w that of the image; D width

import torch
from torch import Tensor, nn

from vitkit.models.positions import RESIZE, Grid, Positions, sincos2d

MOST = 512  # rows or columns of patches that an exported graph takes


class AnyGrid(nn.Module):
    """Adds what Positions adds, on a grid that is known only when the graph runs."""

    line: Tensor

    def __init__(self, positions: Positions):
        super().__init__()
        self.learned = positions
        if positions.kind == "sincos2d":  # exact: the runtime takes rows of a table, it computes no sine
            column = sincos2d((MOST, 1), positions.width)[0, :, positions.width // 2 :]
            self.register_buffer("line", column.float(), persistent=False)

    def forward(self, z: Tensor, grid: Grid, layer: int) -> Tensor:
        """z plus the positions that belong before this layer."""
        p = self.learned
        if p.kind in ("none", "relative") or (layer and p.injection == "stem"):
            return z
        return z + self.at(grid, layer if p.injection == "every" else 0)

    def at(self, grid: Grid, layer: int) -> Tensor:
        """The table of one layer on a grid, (1, T, D)."""
        p, (h, w) = self.learned, grid
        if p.kind == "sincos2d":
            table = crossed(self.line[:h], self.line[:w])
            return torch.cat([torch.zeros_like(table[:, : p.lead]), table], 1)
        if p.kind == "2d":
            y, x = resized_line(p.y[layer], h, p.resize), resized_line(p.x[layer], w, p.resize)
            return torch.cat([p.first[layer][None], crossed(y, x)], 1) if p.lead else crossed(y, x)
        return self.resized(p.table[layer], grid)

    def resized(self, table: Tensor, grid: Grid) -> Tensor:
        p, (h, w) = self.learned, grid
        square = table[p.lead :].unflatten(0, p.grid)  # (H, W, D)
        rows = resize_matrix(p.grid[0], h, p.resize, table.device)
        columns = resize_matrix(p.grid[1], w, p.resize, table.device)
        if p.resize == "dinov2":  # on its own grid that table is not touched, and the 0.1 would touch it
            own = is_length(rows, p.grid[0]) & is_length(columns, p.grid[1])
            rows, columns = (torch.where(own, diagonal(m), m) for m in (rows, columns))
        square = (rows @ square.flatten(1)).unflatten(1, square.shape[1:])  # (h, W, D)
        return torch.cat([table[: p.lead], (columns @ square).flatten(0, 1)])[None]


def resized_line(axis: Tensor, length: int, method: str) -> Tensor:
    """One axis of a 2d table, (n, D/2), on another length."""
    matrix = resize_matrix(axis.shape[0], length, method, axis.device)
    if method == "dinov2":
        matrix = torch.where(is_length(matrix, axis.shape[0]), diagonal(matrix), matrix)
    return matrix @ axis


def crossed(y: Tensor, x: Tensor) -> Tensor:
    """Rows (h, D/2) and columns (w, D/2) to the table of their grid, (1, h*w, D), x first."""
    h, w = y.shape[0], x.shape[0]
    return torch.cat([x[None].expand(h, -1, -1), y[:, None].expand(-1, w, -1)], -1).flatten(0, 1)[None]


def resize_matrix(old: int, new: int, method: str, device: torch.device | None = None) -> Tensor:
    """How much of each old place is in each new one, (new, old): resize_positions along one axis.

    >>> resize_matrix(3, 5, "official")[1]
    tensor([0.5000, 0.5000, 0.0000])
    """
    place = torch.arange(new, device=device, dtype=torch.float32)
    last = place.amax(0)  # new - 1 as a tensor: a graph computes with it, whatever it will be
    corners = RESIZE[method]["align_corners"]
    if corners:
        scale = (old - 1) / last.clamp(min=1)
        at = place * scale
    else:
        scale = old / (last + (1.1 if method == "dinov2" else 1.0))
        at = (place + 0.5) * scale - 0.5
    own = torch.arange(-2, old + 2, device=device)  # two beyond each end, which stand for the end itself
    distance = (at[:, None] - own).abs()
    if RESIZE[method].get("antialias"):
        inside = distance[:, 2:-2] / scale.clamp(min=1)
        kernel = cubic(inside, -0.5)
        return kernel / kernel.sum(1, keepdim=True)
    kernel = (1 - distance).clamp(min=0) if RESIZE[method]["mode"] == "bilinear" else cubic(distance, -0.75)
    ends = own.clamp(0, old - 1)[:, None] == torch.arange(old, device=device)
    return kernel @ ends.float()


def cubic(x: Tensor, a: float) -> Tensor:
    """Keys' kernel at a distance of 0 or more."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def is_length(matrix: Tensor, length: int) -> Tensor:
    """Whether a matrix has that many rows, as a tensor."""
    return torch.arange(matrix.shape[0], device=matrix.device).amax(0) == length - 1


def diagonal(matrix: Tensor) -> Tensor:
    """Ones on the diagonal, in a matrix of the same shape."""
    rows, columns = (torch.arange(n, device=matrix.device) for n in matrix.shape)
    return (rows[:, None] == columns).to(matrix.dtype)
