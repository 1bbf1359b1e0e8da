"""A Triton kernel for the assignment of least cost: each program solves a problem by shortest paths.

Imported on first use, where Triton is installed.
"""

# T rows, Q columns; a program keeps what it knows of each row and column in registers

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def value_at(values, numbers, number):
    """The value of the row or column with this number."""
    return tl.sum(tl.where(numbers == number, values, tl.zeros_like(values)), 0)


@triton.jit
def assign_kernel(costs, real, result, T, Q, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    problem = tl.program_id(0).to(tl.int64)
    costs += problem * T * Q
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = columns < Q
    row_price, column_price = tl.zeros((ROWS,), tl.float64), tl.zeros((COLUMNS,), tl.float64)
    owner = tl.full((COLUMNS,), -1, tl.int32)  # row of each column; -1: none
    used = tl.load(real + problem * T + rows, rows < T, other=0).to(tl.int32)
    for start in range(T):
        if value_at(used, rows, start) > 0:
            distance = tl.full((COLUMNS,), float("inf"), tl.float64)
            before = tl.full((COLUMNS,), -1, tl.int32)  # the column before each one on its path
            done = columns < 0
            reached_at = tl.zeros((ROWS,), tl.float64)  # distance of each row that the search has reached
            reached_rows = rows < 0
            row = start
            last, reached = tl.full((), -1, tl.int32), tl.zeros((), tl.float64)
            while row >= 0:
                reached_at = tl.where(rows == row, reached, reached_at)
                reached_rows = reached_rows | (rows == row)
                cost = tl.load(costs + row * Q + columns, inside, other=float("inf"))
                through = reached + cost.to(tl.float64) - value_at(row_price, rows, row) - column_price
                closer = (through < distance) & (done == 0)
                distance = tl.where(closer, through, distance)
                before = tl.where(closer, last, before)
                open_distance = tl.where(done, float("inf"), distance)
                last = tl.argmin(open_distance, 0).to(tl.int32)
                reached = tl.min(open_distance, 0)
                row = value_at(owner, columns, last)
                done = done | ((columns == last) & (row >= 0))
            row_price += tl.where(reached_rows, reached - reached_at, 0.0)
            column_price -= tl.where(done, reached - distance, 0.0)
            while last >= 0:  # turn the path around
                earlier = value_at(before, columns, last)
                new = tl.where(earlier < 0, start, value_at(owner, columns, earlier))
                owner = tl.where(columns == last, new, owner)
                last = earlier
    for start in range(T):  # the other rows get the columns that are left
        if value_at(used, rows, start) == 0:
            free = tl.min(tl.where(inside & (owner < 0), columns, COLUMNS), 0)
            owner = tl.where(columns == free, start, owner)
    tl.store(result + problem * T + owner, columns.to(tl.int64), inside & (owner >= 0))


def assign_columns(costs: Tensor, real: Tensor) -> Tensor:
    """The column of each row, (B, T), for finite costs (B, T, Q), T <= Q, and rows that are real (B, T)."""
    problems, rows, columns = costs.shape
    result = torch.empty(problems, rows, dtype=torch.int64, device=costs.device)
    width = triton.next_power_of_2(columns)
    with torch.cuda.device(costs.device):
        assign_kernel[(problems,)](
            costs.contiguous(), real.to(torch.int8).contiguous(), result, rows, columns,
            ROWS=triton.next_power_of_2(rows), COLUMNS=width, num_warps=min(8, max(1, width // 256)),
        )  # fmt: skip
    return result
