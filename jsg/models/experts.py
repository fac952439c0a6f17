"""A feed-forward block of several experts, of which each token uses a few. Letters: `jsg/models/inputs.py`; E experts.

Shazeer et al. 2017 (arXiv:1701.06538), with the router of Mixtral (arXiv:2401.04088), a softmax over the experts whose
largest weights count, or that of DeepSeek-V3 (arXiv:2412.19437): sigmoids, which a bias changes for the choice only.
Beside them a token may use one more block, as in DeepSeekMoE (arXiv:2401.06066).

A token has a copy for each of its experts. Each of several devices has the router, so it knows where all copies of all
tokens go. It computes the copies for the experts of its group, which come first, and adds nothing for the others. The
sum over all devices has every copy once.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.inputs import GroupKernels, SharedKernels
from jsg.kernels_pallas.reference_routes import Routes
from jsg.models.block_spec import BesideSpec, ExpertsSpec
from jsg.models.feed_forward import FeedForward
from jsg.models.layers import Linear, RMSNorm, activation_result, parameter, project, whole
from jsg.models.origin import Origin, Source, of_experts
from jsg.models.tensor_parallel import add_up, first_expert, num_groups, on_first_of_group


class SparseFeedForward(nnx.Module):
    """The weighted sum of the gated blocks that the router chooses for a token: w · down(activation(gate(x)) · up(x)).

    The block that all tokens share, if there is one, is added, weighted by a sigmoid if it has a gate.
    """

    def __init__(self, spec: ExpertsSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        self.spec = spec
        router, count = spec.router, spec.count
        kernel = Origin((Source(f"{prefix}.{router.name}.weight", (count, width)),), transposed=True)
        self.router = parameter((width, count), jnp.float32 if router.is_float32 else dtype, kernel)
        self.router_bias = whole(f"{prefix}.{router.name}.bias", (count,), dtype) if router.has_bias else None
        shape = (*(1,) * (router.choice_bias_axes - 1), count)
        bias = Origin((Source(f"{prefix}.{router.choice_bias}", shape),))
        self.choice_bias = parameter((count,), jnp.float32, bias) if router.choice_bias else None

        self.router_norm = RMSNorm(router.norm, f"{prefix}.", width, dtype) if router.norm else None
        self.expert_scale = whole(f"{prefix}.{router.expert_scale}", (count,), dtype) if router.expert_scale else None
        turns, latent = 2 if spec.gate == spec.up else 1, spec.latent
        read_width = latent.width if latent else width
        ends = ((latent.into, width, read_width), (latent.out, read_width, width)) if latent else ()
        self.latent = nnx.List(
            [
                Linear((f"{prefix}.{name}",), read, (made,), dtype, bias=bool(latent and latent.has_bias))
                for name, read, made in ends
            ]
        )

        def kernels(name: str, in_dim: int, out_dim: int, split_axis: int, **place: int) -> nnx.Param:
            """A kernel [in_dim, out_dim] for each expert. A device has its slice of those of its group's experts."""
            sources = of_experts(f"{prefix}.{name}", count, (out_dim, in_dim), spec.stack, **place)
            origin = Origin(sources, transposed=True, split_axis=split_axis, expert_axis=0)
            return parameter((spec.count, in_dim, out_dim), dtype, origin, summed_axis=1)

        def biases(name: str, length: int, split_axis: int | None, **place: int) -> nnx.Param | None:
            """A bias [length] for each expert, shared out as the results of its kernel."""
            if not spec.has_bias:
                return None
            sources = of_experts(f"{prefix}.{name}", count, (length,), spec.stack, **place)
            origin = Origin(sources, split_axis=split_axis, expert_axis=0)
            return parameter((spec.count, length), dtype, origin)

        self.gate = kernels(spec.gate, read_width, spec.inner, 2, turns=turns) if spec.gate else None
        self.up = kernels(spec.up, read_width, spec.inner, 2, turn=turns - 1, turns=turns)
        self.down = kernels(spec.down, spec.inner, read_width, 1)
        self.gate_bias = biases(spec.gate, spec.inner, 1, turns=turns) if spec.gate else None
        self.up_bias = biases(spec.up, spec.inner, 1, turn=turns - 1, turns=turns)
        self.down_bias = biases(spec.down, width, None)
        self.shared = FeedForward(spec.shared, prefix, width, dtype) if spec.shared else None
        self.shared_gate = Linear((f"{prefix}.{spec.shared_gate}",), width, (1,), dtype) if spec.shared_gate else None

    def __call__(
        self,
        x: Float[Array, "T D"],
        judged: Float[Array, "T D"] | None = None,
        *,
        num_real: Int[Array, ""] | None = None,
    ) -> Float[Array, "T D"]:
        """The block's result for each token. Copies are sorted by expert, and their results sorted back.

        The router judges the same rows, or those that are given. Tokens after `num_real` are padding.
        """
        num_own = self.spec.count // num_groups()
        first = first_expert(num_own)
        bias = None if self.choice_bias is None else self.choice_bias[...]
        routes = ops.expert_routes(
            self._logits(x if judged is None else judged),
            self.spec.router.choice,
            bias=bias,
            first=first,
            num_own=num_own,
            num_real=num_real,
        )
        weights = routes.weights
        if self.expert_scale is not None:
            expert = (routes.places[..., None] >= jnp.cumsum(routes.sizes)).sum(-1)  # copies are sorted by expert
            weights *= self.expert_scale[...].at[first + expert].get(mode="clip").astype(jnp.float32)
        if self.spec.router.rounds_weights:
            weights = weights.astype(x.dtype).astype(jnp.float32)
        # Without the barrier XLA joins the kernels of two products of the same rows in every step.
        rows = self.latent[0](lax.optimization_barrier(x)) if self.latent else x
        tokens = routes.tokens
        if self.spec.router.weighs_input:
            rows, tokens = (_of_copies(routes, weights) * rows[tokens]).astype(x.dtype), None
        gate, up, down = (
            None if bias is None else bias[...] for bias in (self.gate_bias, self.up_bias, self.down_bias)
        )
        opened = ((self.gate, gate), (self.up, up))
        kernels = [_of_groups(kernel, bias) for kernel, bias in opened if kernel is not None]
        result = activation_result(x.dtype)
        last = _of_groups(self.down, None if down is None else on_first_of_group(down))
        both = self._beside(x, routes, kernels, last, result)
        if both is None:
            inner = ops.grouped_gated(rows, tokens, kernels, routes.sizes, self.spec.activation, result=result)
            made = ops.grouped_matmul(inner, last.values, routes.sizes, scale=last.scale, bias=last.bias, result=result)
            share = None if self.shared is None else self.shared.part(x)
        else:
            made, share = both
        made = made.astype(x.dtype)[routes.places]
        weighted = made if self.spec.router.weighs_input else weights[..., None] * made
        if num_groups() > 1:  # the copies of other groups were not computed, and NaN may be in their place
            weighted = jnp.where((weights != 0)[..., None], weighted, 0)
        part = weighted.sum(1).astype(x.dtype)  # not as a matmul, which may round
        if self.latent:  # before the sum over devices, so that there is one
            part = self.latent[1].part(part).astype(x.dtype)
        if share is not None:
            share = share.astype(x.dtype)
            part += share if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * share
        part = add_up(part)
        for last in (*self.latent[1:], *([self.shared.down] if self.shared else [])):
            part = part if last.bias is None else part + last.bias[...]
        return part

    def _beside(
        self,
        x: Float[Array, "T D"],
        routes: Routes,
        kernels: list[GroupKernels],
        down: GroupKernels,
        result: jax.typing.DTypeLike,
    ) -> tuple[Float[Array, "copies D"], Float[Array, "T D"]] | None:
        """The results of the copies and of the shared block, if there is one that their launches can do beside them."""
        spec, shared = self.spec, self.shared
        if shared is None or spec.latent or spec.router.weighs_input or spec.activation != shared.activation:
            return None
        if shared.gate_up.bias is not None:
            return None
        block = SharedKernels(shared.gate_up.kernel.get_value(), shared.down.kernel.get_value())
        return ops.experts_beside(x, routes, kernels, down, block, spec.activation, result=result)

    def _logits(self, x: Float[Array, "T D"]) -> Float[Array, "T E"]:
        """The router's numbers for each token, in float32. A kernel of float32 multiplies float32."""
        kernel = self.router[...]
        x = x if self.router_norm is None else self.router_norm(x)
        x = x if self.spec.router.input_factor == 1 else x * self.spec.router.input_factor
        logits = project(x.astype(kernel.dtype), kernel)
        return logits if self.router_bias is None else logits + self.router_bias[...].astype(jnp.float32)


class ExpertsBeside(nnx.Module):
    """Experts beside the feed-forward block of a layer."""

    def __init__(self, spec: BesideSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        self.before, self.after, self.after_block = (
            RMSNorm(norm, f"{prefix}.", width, dtype) for norm in (spec.before, spec.after, spec.after_block)
        )
        self.experts = SparseFeedForward(spec.experts, prefix, width, dtype)

    def __call__(
        self, x: Float[Array, "T D"], made: Float[Array, "T D"], num_real: Int[Array, ""]
    ) -> Float[Array, "T D"]:
        """What both add, of the residual stream and of what the block made."""
        return self.after_block(made) + self.after(self.experts(self.before(x), x, num_real=num_real))


def _of_copies(routes: Routes, weights: Float[Array, "T k"]) -> Float[Array, "copies 1"]:
    """The weight of each sorted copy."""
    is_here = routes.places[routes.tokens] == jnp.arange(len(routes.tokens))[:, None]
    return jnp.where(is_here, weights[routes.tokens], 0).sum(1, keepdims=True)


def _of_groups(param: nnx.Param, bias: Float[Array, "E F"] | None) -> GroupKernels:
    """The kernels of all experts."""
    stored = param.get_value()
    if isinstance(stored, Quantised) and stored.form.scales_columns:
        return GroupKernels(stored.values, stored.wide_scale, bias)
    return GroupKernels(stored, bias=bias)
