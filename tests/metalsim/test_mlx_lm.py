"""mlx-lm's own Metal kernels, unmodified, against its pure-MLX code or the formula they stand for.

Rule: no kernel is changed, but for the barriers that its losses lack, and a test shows those
missing.
"""

import math
from collections.abc import Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests import metalsim as ms
from tests.metalsim.theirs import load
from tests.support.parameter_rows import diagonal, only

THEIRS = load(
    "models.gated_delta",
    "models.ssm",
    "models.bitlinear_layers",
    "models.rwkv7",
    "models.kimi_k3",
    "models.deepseek_v41",
    "tuner.losses",
    "kernels",
    "kernels.norm_add_norm",
)
gd, ssm, bit, rwkv7, kimi_k3, dsv, losses, kernels, norms = THEIRS

R = mx.random.normal
DT = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
TOL = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}
dtypes = pytest.mark.parametrize("d", only(DT, 1))


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    mx.random.seed(0)
    yield


def close(a: mx.array, b: mx.array, d: str) -> None:
    """Largest difference over the largest value."""
    a, b = (np.array(x.astype(mx.float32)) for x in (a, b))
    assert a.shape == b.shape and np.isfinite(a).all()
    err = np.abs(a - b).max() / max(1e-6, np.abs(b).max())
    assert err < TOL[d], err


def rms(x: mx.array, w: mx.array | None, eps: float) -> mx.array:
    x = x.astype(mx.float32)
    return x * mx.rsqrt((x * x).mean(-1, keepdims=True) + eps) * (1 if w is None else w)


@pytest.mark.parametrize(
    "kind, d", diagonal(["plain", "mask", "vec", "vec_mask", "packed", "xtree"], list(DT), every=2)
)
def test_gated_delta(kind: str, d: str) -> None:
    B, T, Hk, Hv, Dk, Dv = 2, 5, 2, 4, (128 if kind in ("packed", "xtree") else 64), 32
    t = DT[d]
    q, k = (R((B, T, Hk, Dk)).astype(t) * Dk**-0.5 for _ in range(2))
    v = R((B, T, Hv, Dv)).astype(t)
    g = mx.random.uniform(0.5, 1, (B, T, Hv, Dk) if "vec" in kind else (B, T, Hv))
    beta = mx.random.uniform(0, 1, (B, T, Hv)).astype(t)
    s = R((B, Hv, Dv, Dk))
    mask = mx.array([[True] * 3 + [False] * 2, [True] * 5]) if "mask" in kind else None
    special = {"xtree": gd.gated_delta_kernel_xtree, "packed": gd.gated_delta_kernel}
    f = special.get(kind, gd.gated_delta_kernel_unpacked)
    y, st = f(q, k, v, g, beta, s, mask)
    yr, sr = gd.gated_delta_ops(q, k, v, g, beta, s, mask)
    if mask is not None:
        yr = mx.where(mask[..., None, None], yr, 0)
        y = mx.where(mask[..., None, None], y, 0)
    close(y, yr, d)
    close(st, sr, d)


def test_gated_delta_packed_is_bitwise_xtree() -> None:
    q, k = (R((1, 4, 2, 128)) * 0.1 for _ in range(2))
    v = R((1, 4, 2, 32))
    g = mx.random.uniform(0.5, 1, (1, 4, 2))
    b = mx.random.uniform(0, 1, (1, 4, 2))
    s = R((1, 2, 32, 128))
    a = gd.gated_delta_kernel_xtree(q, k, v, g, b, s)
    p = gd.gated_delta_kernel(q, k, v, g, b, s)
    assert ms.last().kernel != "gated_delta_step_xtree"
    assert mx.array_equal(a[0], p[0]).item() and mx.array_equal(a[1], p[1]).item()


@dtypes
def test_ssm(d: str) -> None:
    t = DT[d]
    n, h, dh, g, ds = 1, 4, 16, 2, 64  # for n > 1 the kernel itself differs from its reference
    x = R((n, 1, h, dh)).astype(t)
    B, C = (R((n, 1, g, ds)).astype(t) for _ in range(2))
    A = R((h,))
    D = R((h,))
    dt = R((n, 1, h))
    db = R((h,))
    st = R((n, h, dh, ds))
    y, s = ssm.ssm_update_kernel(x, A, B, C, D, dt, db, st, (0.001, 100.0))
    yr, sr = ssm.ssm_attn(x, A, B, C, D, dt, db, st, (0.001, 100.0))
    close(y, yr, d)
    close(s, sr, d)


@pytest.mark.parametrize("d, inv", diagonal(list(DT), [False, True]))
def test_bitlinear(d: str, inv: bool) -> None:
    t = DT[d]
    o, i, b = 16, 256, 3
    layer = bit.BitLinear(i, o, bias=False, invert_weight_scales=inv)
    W = np.random.default_rng(0).integers(0, 3, (o, i)).astype(np.uint8)
    layer.weight = mx.array(
        sum(W[j * o // 4 : (j + 1) * o // 4] << (2 * j) for j in range(4)).astype(np.uint8)
    )
    layer.weight_scale = mx.array([1.7]).astype(t)
    x = R((b, i)).astype(t)
    s = layer.weight_scale.astype(mx.float32)
    close(
        layer(x),
        (x.astype(mx.float32) @ mx.array(W.astype(np.float32) - 1).T) * (1 / s if inv else s),
        d,
    )


@dtypes
def test_rwkv7(d: str) -> None:
    t = DT[d]
    B, T, H, D = 2, 4, 2, 64
    r, w, k, v, a, b = (R((B, T, H, D)).astype(t) * 0.2 for _ in range(6))
    w = mx.sigmoid(w)
    s = R((B, H, D, D)).astype(t)
    y, st = rwkv7.wkv7_kernel(r, w, k, v, a, b, s)
    S = s.astype(mx.float32)
    ys = []
    for i in range(T):
        ri, wi, ki, vi, ai, bi = (z[:, i].astype(mx.float32) for z in (r, w, k, v, a, b))
        sa = S @ ai[..., None]
        S = S * wi[:, :, None, :] + sa @ bi[:, :, None, :] + vi[..., None] @ ki[:, :, None, :]
        ys.append((S @ ri[..., None])[..., 0])
    close(y, mx.stack(ys, 1), d)
    close(st, S, d)


@dtypes
def test_kimi_attn_res(d: str) -> None:
    t = DT[d]
    Kb, N, D = 3, 5, 256
    raw = R((Kb, N, D)).astype(t)
    inv = mx.abs(R((Kb, N)))
    p = R((N, D)).astype(t)
    w = R((D,)).astype(t) * 0.05
    o = kimi_k3._attn_res_kernel(
        inputs=[raw, inv, p, w, mx.array([1e-5]), N],
        template=[("InT", t), ("K", Kb), ("D", D), ("THREADS", 512)],
        grid=(512, N, 1),
        threadgroup=(512, 1, 1),
        output_shapes=[p.shape],
        output_dtypes=[t],
    )[0]
    close(o, kimi_k3._attn_res_combine(raw, inv, p, w, 1e-5), d)


def test_deepseek_sinkhorn() -> None:
    c = mx.softmax(R((70, 4, 4)), -1) + 1e-6
    e = mx.array([1e-6])
    o = dsv._sinkhorn_kernel(
        inputs=[c, e],
        template=[("HC", 4), ("ITERS", 5)],
        grid=(70, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[c.shape],
        output_dtypes=[mx.float32],
    )[0]
    close(o, dsv._sinkhorn(c, iters=5, eps=e), "f32")


@dtypes
def test_qk_norm_and_rope(d: str) -> None:
    t = DT[d]
    B, L, HQ, HK, D = 2, 3, 4, 2, 64
    x = R((B, L, 2 * (HQ + HK) * D)).astype(t)
    q, k = kernels.qk_norm(x, n_heads=HQ, n_kv_heads=HK, head_dim=D, eps=1e-5, query_scale=0.125)
    xr = x[..., : (HQ + HK) * D].reshape(B, L, HQ + HK, D)
    n = rms(xr, None, 1e-5).astype(t)
    qr, kr = (n[:, :, :HQ].astype(mx.float32) * 0.125).astype(t), n[:, :, HQ:]
    close(q, qr, d)
    close(k, kr, d)
    q, k = kernels.qk_norm_rope(
        x,
        n_heads=HQ,
        n_kv_heads=HK,
        head_dim=D,
        eps=1e-5,
        query_scale=0.125,
        rope_base=10000.0,
        offset=7,
    )

    def rope(z: mx.array) -> mx.array:
        z = z.transpose(0, 2, 1, 3)
        z = mx.fast.rope(z, D, traditional=True, base=10000.0, scale=1.0, offset=7)
        return z.transpose(0, 2, 1, 3)

    close(q, rope(qr), d)
    close(k, rope(kr), d)


def test_expert_routing() -> None:
    E, Kk = 72, 6
    lg = R((5, E))
    b = R((E,)) * 0.1
    i, w = kernels.expert_routing(lg, b, top_k=Kk, multiplier=1.5, score_eps=1e-20, route_scale=2.5)
    s = mx.sigmoid(lg * 1.5)
    ir = mx.argsort(-(s + b), axis=-1)[:, :Kk]
    wr = mx.take_along_axis(s, ir, -1)
    assert mx.array_equal(i, ir.astype(mx.uint32)).item()
    close(w, wr / wr.sum(-1, keepdims=True) * 2.5, "f32")


@pytest.mark.parametrize("d, D", diagonal(list(DT), [200, 2048], every=2))
def test_norm_add_norm(d: str, D: int) -> None:
    t = DT[d]
    N = 3
    br = R((N, D)).astype(t)
    st = R((N, D))
    al, be, pw = R((D,)), R((D,)), R((D,)).astype(t)
    nn_ = nn.RMSNorm(D, 1e-5)
    nn_.weight = R((D,)).astype(t)
    s, n = kernels.norm_add_norm(
        branch=br, stream=st, alpha=al, beta=be, post_weight=pw, post_eps=1e-6, next_norm=nn_
    )
    sr = al * st + be * rms(pw.astype(mx.float32) * br.astype(mx.float32), None, 1e-6)
    close(s, sr, d)
    close(n, rms(sr, nn_.weight.astype(mx.float32), 1e-5), d)
    close(norms.pre_norm(st, nn_, dtype=t), rms(st, nn_.weight.astype(mx.float32), 1e-5), d)


@dtypes
def test_post_expert_norm_combine(d: str) -> None:
    t = DT[d]
    e = R((3, 4, 1000)).astype(t)
    w = mx.softmax(R((3, 4)), -1)
    nw = R((1000,)).astype(t)
    o = kernels.post_expert_norm_combine(e, w, norm_weight=nw, eps=1e-6)
    x = rms(e.astype(mx.float32) * nw.astype(mx.float32), None, 1e-6)
    close(o, (x * w[..., None]).sum(1), d)


@dtypes
def test_rms_norm_sigmoid_gate(d: str) -> None:
    t = DT[d]
    B, H, L, D = 2, 3, 5, 64
    x = R((B, L, H, D)).astype(t).transpose(0, 2, 1, 3)
    g = R((B, L, 2 * H * D)).astype(t)[..., : H * D]
    o = kernels.rms_norm_sigmoid_gate(x, g, eps=1e-5)
    close(
        o,
        rms(x, None, 1e-5).transpose(0, 2, 1, 3).reshape(B, L, H * D)
        * mx.sigmoid(g.astype(mx.float32)),
        d,
    )


LOSS = {
    "kl_fwd": losses._kl_forward_kernel,
    "kl_bwd": losses._kl_backward_kernel,
    "js_fwd": losses._js_forward_kernel,
    "js_bwd": losses._js_backward_kernel,
}


def _loss(
    k: ms.Kernel, ins: Sequence[mx.array], outs: Sequence[tuple[int, ...]], V: int, t: mx.Dtype
) -> list[mx.array]:
    return k(
        inputs=ins,
        output_shapes=outs,
        output_dtypes=[t] * len(outs),
        template=[("T", t), ("V", V)],
        grid=(1024, 2, 1),
        threadgroup=(1024, 1, 1),
    )


def _fixed(k: ms.Kernel) -> ms.Kernel:
    """With the barriers that upstream lacks."""
    s = k.source.replace(
        "        // Share the sum_exp across",
        "        threadgroup_barrier(mem_flags::mem_threadgroup);\n        // Share the sum_exp across",
    )
    return ms.metal_kernel(
        k.name, k.input_names, k.output_names, s.replace("mem_none", "mem_threadgroup")
    )


@pytest.mark.parametrize("name", only(LOSS, 0))
def test_upstream_loss_kernels_race(name: str) -> None:
    t, V = mx.float32, 5000
    q, p = (R((2, V)) for _ in range(2))
    c = mx.ones(2)
    ins = [q, p] + ([c] if "bwd" in name else []) + ([c] if name == "js_bwd" else [])
    outs = [(2,)] * (2 if name == "js_fwd" else 1) if "fwd" in name else [q.shape]
    with pytest.raises(ms.MetalSimError) as e:
        _loss(LOSS[name], ins, outs, V, t)
    assert {f.kind for f in e.value.report.errors} == {"race"}


@dtypes
@pytest.mark.parametrize("order", only([0, 1, 7], 2))
def test_losses_with_the_missing_barriers(d: str, order: int) -> None:
    t, V = DT[d], 5000
    q, p = (R((2, V)).astype(t) for _ in range(2))
    c = mx.array([1.0, 2.0]).astype(t)
    with ms.configure(order=order):
        (a,) = _loss(_fixed(LOSS["kl_fwd"]), [q, p], [(2,)], V, t)
        (dq,) = _loss(_fixed(LOSS["kl_bwd"]), [q, p, c], [q.shape], V, t)
        j = _loss(_fixed(LOSS["js_fwd"]), [q, p], [(2,), (2,)], V, t)
        (jq,) = _loss(_fixed(LOSS["js_bwd"]), [q, p, c, j[1]], [q.shape], V, t)
    lq, lp = (
        z.astype(mx.float32) - mx.logsumexp(z.astype(mx.float32), -1, keepdims=True) for z in (q, p)
    )
    close(a, (mx.exp(lp) * (lp - lq)).sum(-1), d)
    close(dq, (mx.exp(lq) - mx.exp(lp)) * c[:, None].astype(mx.float32), d)
    m = mx.logaddexp(lq, lp) - math.log(2)
    klp, klq = (mx.exp(lp) * (lp - m)).sum(-1), (mx.exp(lq) * (lq - m)).sum(-1)
    close(j[0], 0.5 * (klp + klq), d)
    close(j[1], klq, d)
    close(
        jq,
        0.5
        * c[:, None].astype(mx.float32)
        * mx.exp(lq)
        * ((lq - m) - j[1].astype(mx.float32)[:, None]),
        d,
    )


def test_mlx_lm_itself_is_untouched() -> None:
    from mlx_lm.models import gated_delta

    assert gated_delta is not gd and gated_delta.gated_delta_kernel is not gd.gated_delta_kernel
    assert not any(isinstance(value, ms.Kernel) for value in vars(gated_delta).values())
    assert any(isinstance(value, ms.Kernel) for value in vars(gd).values())
