"""A decoder that walks a model's layers itself: few operations a token, and always the same, as a CUDA graph needs.

Shapes: R live rows, M model, I MLP, H query heads, G key-value heads, D head size, B prompts of P tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from rloo_kit.rollout.decoders import ModuleDecoder, SlotCache
from rloo_kit.sizes import MERGED_LIMIT_BYTES, NESTED_BLOCK

# Classes whose layers are those that `DirectDecoder` walks; a class that is like them but for a scale, layers without
# positions or another rotation gives almost the same logits for a few tokens.
PLAIN_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_vl_text", "qwen2_5_vl_text")
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # angles that do not depend on the sequence's length


class NotPlainError(Exception):
    """The model has a part that the decoder does not support; the message names it."""


class _Weights(NamedTuple):
    """One layer of `DirectDecoder`; norms are (weight, epsilon)."""

    qkv: "Product"
    out: "Product"
    gate_up: "Product"
    down: "Product"
    before_attention: tuple[torch.Tensor, float]
    before_mlp: tuple[torch.Tensor, float]
    head_norm: tuple[torch.Tensor, float] | None  # (H + G, D), of queries and keys; None without


class DirectDecoder(ModuleDecoder):
    """Walks the layers with the modules' own weights, 16-bit, float32 or bitsandbytes' 4-bit ones.

    The projections of one input are one product, their adapters another, cast to the model's dtype for the rollout; a
    small float32 model is copied with the adapter merged. It prefills by itself, so Unsloth's modules serve as well as
    transformers'. Raises NotPlainError for a model with other parts.
    """

    replayable = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        config, backbone = self.model.config.get_text_config(), self.model.get_decoder()
        _check(self.model)
        attention = backbone.layers[0].self_attn
        self.head_size = attention.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._scale = attention.scaling
        self._embedding = self.model.get_input_embeddings().weight  # (V, M)
        self.dtype = self._embedding.dtype
        self._head, self._rotary = self.model.get_output_embeddings(), backbone.rotary_emb
        self._last = _norm_of(backbone.norm, self.dtype)
        self._length = 0  # of the table of angles
        size = sum(weight.numel() * weight.itemsize for weight in backbone.layers.parameters())
        self._merges = self.dtype == torch.float32 and size <= MERGED_LIMIT_BYTES
        self._layers = [self._read(layer) for layer in backbone.layers]

    def prepare(self, length: int) -> None:
        if length > self._length:
            self._length = max(64, 2 * length)
            self._rotate()

    def prefill(self, prompts: list[list[int]], cache: SlotCache, slots: list[tuple[int, int]]) -> None:
        if self.reads_images:
            return super().prefill(prompts, cache, slots)
        width = max(map(len, prompts))
        self.prepare(width)
        ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=self.device)  # (B, P)
        places = torch.arange(width, device=self.device).repeat(len(prompts))

        def attend(number: int, states: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            sizes = (len(prompts), width, -1, self.head_size)
            queries, keys = states.view(sizes).transpose(1, 2).split((self.heads, self.kv_heads), dim=1)
            values = values.view(sizes).transpose(1, 2)  # (B, G, P, D)
            for row, (first, count) in enumerate(slots):
                length = len(prompts[row])
                cache.insert(number, first, count, keys[row, :, :length], values[row, :, :length])
            keys, values = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (keys, values))
            output = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=self._scale)
            return output.transpose(1, 2).reshape(ids.numel(), -1)

        self._walk(ids.flatten(), places, attend)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        self.prepare(cache.length)
        mask = None  # what is added to the scores, (R, 1, 1, L)
        if not cache.is_even:
            zeros = torch.zeros(cache.mask.shape, dtype=self.dtype, device=self.device)
            mask = zeros.masked_fill_(~cache.mask, -torch.inf)

        def attend(number: int, states: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            keys, values = cache.write(number, states[:, self.heads :], values)
            queries = states[:, : self.heads].reshape(len(tokens), self.kv_heads, -1, self.head_size)  # groups as rows
            output = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self._scale)
            return output.reshape(len(tokens), -1)

        offsets = cache.position_offsets
        places = positions if offsets is None else positions + offsets[: len(positions), 0]
        hidden = self._walk(tokens, places, attend)
        return functional.linear(self._normalise(hidden, self._last), self._head.weight, self._head.bias)

    def _walk(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The last hidden states (N, M) of tokens (N,) at positions (N,). `attend`: from a layer's number, its rotated
        queries and keys (N, H + G, D) and its values (N, G, D) to (N, H D)."""
        cosine, sine = self._cosine[positions][:, None], self._sine[positions][:, None]  # (N, 1, D)
        both, half = self.heads + self.kv_heads, self.head_size // 2
        hidden = functional.embedding(tokens, self._embedding)
        for number, layer in enumerate(self._layers):
            states = layer.qkv(self._normalise(hidden, layer.before_attention))
            states = states.view(len(tokens), both + self.kv_heads, self.head_size)
            turned = states[:, :both]  # queries and keys
            if layer.head_norm is not None:
                weight, eps = layer.head_norm
                turned = functional.rms_norm(turned, (self.head_size,), None, eps) * weight
            turned = torch.addcmul(turned * cosine, turned.roll(half, -1), sine)
            hidden = hidden + layer.out(attend(number, turned, states[:, both:]))
            gate, up = layer.gate_up(self._normalise(hidden, layer.before_mlp)).chunk(2, dim=-1)
            hidden = hidden + layer.down(functional.silu(gate) * up)
        return hidden

    @staticmethod
    def _normalise(states: torch.Tensor, norm: tuple[torch.Tensor, float]) -> torch.Tensor:
        return functional.rms_norm(states, states.shape[-1:], *norm)

    def _rotate(self) -> None:
        """(length, D) cosines, and sines that are negative for the first half of a head, whose partner is the other."""
        places = torch.arange(self._length, dtype=torch.float32, device=self.device)
        angles = torch.outer(places, self._rotary.inv_freq.to(self.device, torch.float32))  # (length, D / 2)
        if 2 * angles.size(1) != self.head_size:
            raise NotPlainError("rotates only a part of each head")
        scale, sine = self._rotary.attention_scaling, angles.sin()
        self._cosine = (torch.cat((angles.cos(),) * 2, dim=1) * scale).to(self.dtype)
        self._sine = (torch.cat((-sine, sine), dim=1) * scale).to(self.dtype)

    def _read(self, layer: Any) -> _Weights:
        attention, mlp = layer.self_attn, layer.mlp
        product = partial(Product, dtype=self.dtype, merges=self._merges)
        head_norm = None
        if getattr(attention, "q_norm", None) is not None:
            (query, eps), (key, _) = _norm_of(attention.q_norm, self.dtype), _norm_of(attention.k_norm, self.dtype)
            head_norm = torch.cat((query.expand(self.heads, -1), key.expand(self.kv_heads, -1))), eps
        return _Weights(
            qkv=product((attention.q_proj, attention.k_proj, attention.v_proj)),
            out=product((attention.o_proj,)),
            gate_up=product((mlp.gate_proj, mlp.up_proj)),
            down=product((mlp.down_proj,)),
            before_attention=_norm_of(layer.input_layernorm, self.dtype),
            before_mlp=_norm_of(layer.post_attention_layernorm, self.dtype),
            head_norm=head_norm,
        )


class Product:
    """Several projections of one input (N, in) as one (N, out), with their adapters.

    4-bit blocks lie along a row, so packed rows are joined exactly; the modules' weights become views of the joined
    ones, and no second copy exists. Other projections are multiplied one by one: dynamic 4-bit models keep some in 16
    bits. The adapters' first matrices are stacked, their second ones, scaled, are one block-diagonal matrix.
    """

    def __init__(self, modules: Sequence[Any], dtype: torch.dtype, merges: bool = False) -> None:
        bases = [module.base_layer if hasattr(module, "lora_A") else module for module in modules]
        kinds = {_form_of(base, dtype) for base in bases}
        biased = {base.bias is not None for base in bases}
        joined = [bases] if len(kinds) == len(biased) == 1 and kinds != {None} else [[base] for base in bases]
        self.parts: list[Callable[[torch.Tensor], torch.Tensor]] = []
        for part in joined:
            if _form_of(part[0], dtype) is None:
                self.parts.append(partial(functional.linear, weight=part[0].weight, bias=part[0].bias))
            else:
                self.parts.append(_four_bit(part, dtype))
        self.first = self.second = None  # (in, r), (r, out)
        adapters = [(module, _adapter_of(module)) for module in modules]
        if merges and kinds == {None} and len(biased) == 1:
            weights = [base.weight for base in bases]
            for number, (module, name) in enumerate(adapters):
                if name is not None:
                    weights[number] = weights[number] + module.get_delta_weight(name)
            bias = torch.cat([base.bias for base in bases]) if bases[0].bias is not None else None
            self.parts = [partial(functional.linear, weight=torch.cat(weights), bias=bias)]
        elif firsts := [module.lora_A[name].weight for module, name in adapters if name is not None]:
            self.first = torch.cat(firsts).to(dtype).t()
            blocks = [
                firsts[0].new_zeros(module.out_features, 0)
                if name is None
                else module.lora_B[name].weight * module.scaling[name]
                for module, name in adapters
            ]
            self.second = torch.block_diag(*blocks).to(dtype).t().contiguous()

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        parts = [part(states) for part in self.parts]
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return output if self.first is None else torch.addmm(output, states @ self.first, self.second)


def _form_of(base: Any, dtype: torch.dtype) -> tuple[int, str] | None:
    """Block size and type of a projection's 4-bit weights; None for plain ones in `dtype`."""
    if type(base) is torch.nn.Linear and base.weight.dtype == dtype:
        return None
    state = getattr(base.weight, "quant_state", None)
    if type(base).__name__ != "Linear4bit" or state is None:
        raise NotPlainError(f"has projections that are neither plain {dtype} nor 4-bit")
    if base.weight.dtype != torch.uint8 or base.compute_dtype not in (None, dtype) or state.shape[1] % state.blocksize:
        raise NotPlainError("has 4-bit matrices of another form")
    if getattr(state, "packing_format_for_cpu", False):
        raise NotPlainError("has 4-bit matrices that bitsandbytes has packed for this CPU")
    return state.blocksize, state.quant_type


def _four_bit(bases: Sequence[Any], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """bitsandbytes' product with 4-bit weights, those of several projections joined. Scales that are 8-bit themselves
    are unpacked to float32 for joined ones, since each matrix has its own offset."""
    from bitsandbytes.functional import dequantize_blockwise  # not where only plain models are loaded

    states = [base.weight.quant_state for base in bases]
    nested: dict[str, torch.Tensor] = {}
    if len(states) == 1 and states[0].nested and states[0].state2.blocksize == NESTED_BLOCK:
        (state,) = states
        scales = state.state2.absmax
        nested = {"absmax_8bit": state.absmax, "absmax_code": state.state2.code, "absmax_offset": state.offset}
    else:
        unpacked = [
            dequantize_blockwise(state.absmax, state.state2).float() + state.offset if state.nested else state.absmax
            for state in states
        ]
        scales = torch.cat([part.flatten() for part in unpacked])
    bias = None if bases[0].bias is None else torch.cat([base.bias for base in bases]).to(dtype)
    packed = join_in_place([base.weight for base in bases])
    shape = [sum(state.shape[0] for state in states), states[0].shape[1]]
    block, kind = states[0].blocksize, states[0].quant_type

    def multiply(inputs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
            inputs, packed, shape, scales, block, kind, bias=bias, **nested
        )
        return product

    return multiply


def join_in_place(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """One (n, 1) tensor of packed weights, which become views of it, unless they lie together already."""
    flat = [weight.data.view(-1) for weight in weights]
    ends = [part.data_ptr() + part.numel() for part in flat]
    if len(flat) == 1 or [part.data_ptr() for part in flat[1:]] == ends[:-1]:
        size = sum(part.numel() for part in flat)
        if flat[0].storage_offset() + size <= flat[0].untyped_storage().nbytes():
            return flat[0].as_strided((size, 1), (1, 1))
    joined = torch.cat(flat)
    for weight, part in zip(weights, joined.split([part.numel() for part in flat]), strict=True):
        weight.data = part.view(weight.shape)
    return joined.view(-1, 1)


def _adapter_of(module: Any) -> str | None:
    """The name of a projection's adapter that is switched on and not merged."""
    if not hasattr(module, "lora_A"):
        return None
    if module.disable_adapters and module.merged:
        raise NotPlainError("has a merged adapter that is switched off")
    names = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or module.merged or not names:
        return None
    if len(names) > 1 or names[0] in module.lora_variant or module.lora_B[names[0]].bias is not None:
        raise NotPlainError("has an adapter that is more than two matrices")
    return str(names[0])


def _check(model: Any) -> None:
    config = model.config.get_text_config()
    if config.model_type not in PLAIN_TYPES or config.hidden_act != "silu":
        raise NotPlainError("is another class, or has another activation")
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") not in FIXED_ROTATIONS:
        raise NotPlainError("has positions of another kind")
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    if tuple(map(type, tables)) != (torch.nn.Embedding, torch.nn.Linear):
        raise NotPlainError("has an embedding or a head that is not plain")
    if tables[0].weight.dtype != tables[1].weight.dtype or len({weight.device for weight in model.parameters()}) > 1:
        raise NotPlainError("has an embedding and a head of different kinds, or several devices")


def _norm_of(module: Any, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Weight and epsilon of a root-mean-square norm."""
    if not hasattr(module, "variance_epsilon"):
        raise NotPlainError("has norms of another kind")
    return module.weight.to(dtype), module.variance_epsilon
