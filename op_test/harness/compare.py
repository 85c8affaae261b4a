"""Comparison per head: a head that is wrong cannot hide among many that are right."""

import torch


def head_errors(got, want, head_dim):
    """Relative L2 error of every head, float64; a head whose reference is all zero gives the plain L2 norm."""
    assert got.shape == want.shape, f"shape {list(got.shape)}, expected {list(want.shape)}"
    got = got.double().movedim(head_dim, 0).flatten(1)
    want = want.double().movedim(head_dim, 0).flatten(1)
    norm = want.norm(dim=1)
    return (got - want).norm(dim=1) / torch.where(norm > 0, norm, torch.ones_like(norm))


def assert_heads_close(name, got, want, head_dim, limit):
    """Fail unless each head's relative L2 error is at most ``limit``; a NaN anywhere fails. Returns the worst."""
    errors = head_errors(got, want, head_dim)
    if errors.numel() == 0:
        return 0.0
    worst = int(errors.nan_to_num(nan=float("inf")).argmax())
    error = errors[worst].item()
    assert error <= limit, f"{name}: head {worst} has relative L2 error {error:.2e}, limit {limit:.0e}"  # NaN fails too
    return error
