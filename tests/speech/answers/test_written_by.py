"""Every form of calls and of thoughts is written by a family that jsg loads."""

from jsg.models.registry import FAMILIES, WRAPPERS
from jsg.speech.answers.thoughts import MARKERS
from jsg.speech.dialects import DIALECTS

ELSEWHERE = "programs use it against other endpoints"

CALLS = {
    "kimi_k2": "DeepseekV3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v31": "DeepseekV3ForCausalLM",
    "harmony": "GptOssForCausalLM",
    "mistral_args": "Mistral3ForConditionalGeneration",
    "mistral": "MistralForCausalLM",
    "nemotron_json": "NemotronHForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "qwen3_coder": "Qwen3MoeForCausalLM",  # and Nemotron 3
    "glm45": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "functiongemma": "Gemma3ForCausalLM",
    "pythonic": "Llama4ForConditionalGeneration",  # and Llama 3.2
    "hermes": "Qwen3ForCausalLM",
    "llama3_json": "LlamaForCausalLM",
}
THOUGHTS = {
    "cohere-command-a": "Cohere2ForCausalLM",
    "deepseek-r1": "DeepseekV3ForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "ernie45": "Ernie4_5_MoeForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "glm45": "Glm4MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "hunyuan": "HunYuanDenseV1ForCausalLM",
    "kimi": ELSEWHERE,  # Kimi-VL
    "kimi-k2": "DeepseekV3ForCausalLM",
    "minimax": "MiniMaxM2ForCausalLM",
    "minimax-append-think": "MiniMaxM2ForCausalLM",
    "mistral": "Mistral3ForConditionalGeneration",
    "nemotron": "NemotronHForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-thinking": "Qwen3MoeForCausalLM",
    "seed-oss": "SeedOssForCausalLM",
    "step3": ELSEWHERE,
}


def test_every_dialect_has_a_family():
    assert CALLS.keys() == DIALECTS.keys()
    assert set(CALLS.values()) <= {*FAMILIES, *WRAPPERS}


def test_every_marker_has_a_family_or_is_for_programs():
    assert THOUGHTS.keys() == MARKERS.keys()
    assert set(THOUGHTS.values()) - {*FAMILIES, *WRAPPERS} == {ELSEWHERE}
