"""Writes a checkpoint of `bench.peers.checkpoint` as GGUF: `PYTHON gguf_writer.py DIRECTORY KIND`.

The interpreter of `--llama-python` or `--openvino-python` runs this file, which imports nothing of jsg. KIND is `f32`,
`f16`, `bf16` or `q8_0`; norms stay float32. GGUF pairs neighbouring numbers of a head for the rotation, where
safetensors of Hugging Face pair its halves, so the rows of queries and keys change places.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

KINDS = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def main(directory: Path, kind: str) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    partial = directory / f"{kind}.partial"
    writer = gguf.GGUFWriter(str(partial), "llama")
    write_shape(writer, config, gguf.LlamaFileType[KINDS[kind]])
    write_tokenizer(writer, json.loads((directory / "tokenizer.json").read_text(encoding="utf-8")), config)
    write_weights(writer, load_file(directory / "model.safetensors"), config, gguf.GGMLQuantizationType[kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(directory / f"{kind}.gguf")


def write_shape(writer: gguf.GGUFWriter, config: dict, file_type: int) -> None:
    writer.add_name("bench.peers")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(file_type)


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict, config: dict) -> None:
    pieces = {number: piece for piece, number in tokenizer["model"]["vocab"].items()}
    special = {token["id"] for token in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(config["vocab_size"])]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([pieces[i] for i in range(config["vocab_size"])])
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def write_weights(writer: gguf.GGUFWriter, weights: dict, config: dict, kind: gguf.GGMLQuantizationType) -> None:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = {old: (new, None) for old, new in OUTER.items()}
    for layer in range(config["num_hidden_layers"]):
        for old, new in LAYER.items():
            names[f"model.layers.{layer}.{old}.weight"] = (f"blk.{layer}.{new}.weight", heads.get(new))
    for old, (new, num_heads) in names.items():
        array = weights[old]
        if array.ndim == 1:
            writer.add_tensor(new, array.astype(np.float32))
            continue
        array = array if num_heads is None else in_pairs(array, num_heads)
        writer.add_tensor(new, gguf.quants.quantize(array, kind), raw_dtype=kind)


def in_pairs(array: np.ndarray, num_heads: int) -> np.ndarray:
    rows, columns = array.shape
    return array.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
