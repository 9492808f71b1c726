"""The presets (sizes and other settings of models), and tables of dtypes and layouts."""

import torch

# The architecture of each family of models; a preset adds its sizes.
GPT2 = dict(normalization="LayerNorm", layernorm_epsilon=1e-5, position_embedding_type="learned_absolute",
            rotary_base=10_000.0, use_rope_scaling=False, rope_scaling_factor=8.0, swiglu=False,
            disable_bias_linear=False, add_qkv_bias=False, qk_layernorm=False,
            untie_embeddings_and_output_weights=False)
LLAMA = GPT2 | dict(normalization="RMSNorm", position_embedding_type="rope", swiglu=True, disable_bias_linear=True)

UNTIED = LLAMA | dict(untie_embeddings_and_output_weights=True)
QWEN = LLAMA | dict(rotary_base=1_000_000.0, layernorm_epsilon=1e-6)

# The sizes of GPT-2 come from its published weights, those of GPT-3 from 2005.14165, table 2.1. The gpt2 presets use
# GPT-3's learning rates. The other sizes come from the configurations published with the models' weights (2307.09288,
# 2407.21783, 2412.15115, 2505.09388, 2502.02737, 2401.04088). The models nano, nano-llama and nano-moe are small enough
# for a laptop. A token passes through as many weights of experts in nano-moe as of MLPs in nano-llama.
FIELDS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "lr", "global_batch_size",
          "micro_batch_size", "init_method_std", "num_query_groups", "ffn_hidden_size")
TABLE = (                # name, the published model's vocabulary, FIELDS, the other settings
    ("nano",            None,  8,   96,  8,  128, 4e-3,     16,  4, 0.06, GPT2),
    ("gpt2",           50257, 12,  768, 12, 1024, 6e-4,    512, 16, 0.02, GPT2),
    ("gpt2-medium",    50257, 24, 1024, 16, 1024, 3e-4,    512,  8, 0.02, GPT2),
    ("gpt2-large",     50257, 36, 1280, 20, 1024, 2.5e-4,  512,  8, 0.02, GPT2),
    ("gpt2-xl",        50257, 48, 1600, 25, 1024, 2e-4,    512,  4, 0.02, GPT2),
    ("gpt3-2.7b",      50257, 32, 2560, 32, 2048, 1.6e-4,  512,  4, 0.02, GPT2),
    ("gpt3-6.7b",      50257, 32, 4096, 32, 2048, 1.2e-4, 1024,  2, 0.02, GPT2),
    ("gpt3-13b",       50257, 40, 5120, 40, 2048, 1e-4,   1024,  1, 0.02, GPT2),
    ("nano-llama",      None,  8,   96,  8,  128, 4e-3,     16,  4, 0.06,  4,  None, LLAMA),
    ("llama2-7b",      32000, 32, 4096, 32, 4096, 3e-4,   1024,  1, 0.02, 32, 11008, UNTIED),
    ("llama2-13b",     32000, 40, 5120, 40, 4096, 3e-4,   1024,  1, 0.02, 40, 13824, UNTIED),
    ("llama3-8b",     128256, 32, 4096, 32, 8192, 3e-4,    512,  1, 0.02,  8, 14336, UNTIED | dict(rotary_base=5e5)),
    ("llama3.2-1b",   128256, 16, 2048, 32, 8192, 3e-4,    512,  1, 0.02,  8,  8192, LLAMA | dict(
        rotary_base=500_000.0, use_rope_scaling=True, rope_scaling_factor=32.0)),
    ("qwen2.5-0.5b",  151936, 24,  896, 14, 4096, 3e-4,    512,  2, 0.02,  2,  4864, QWEN | dict(add_qkv_bias=True)),
    ("qwen3-0.6b",    151936, 28, 1024, 16, 4096, 3e-4,    512,  2, 0.02,  8,  3072, QWEN | dict(
        kv_channels=128, qk_layernorm=True)),
    ("nano-moe",        None,  8,   96,  8,  128, 4e-3,     16,  4, 0.06,  4,   128, LLAMA | dict(
        num_experts=8, moe_aux_loss_coeff=0.01)),
    ("mixtral-8x7b",   32000, 32, 4096, 32, 4096, 3e-4,    512,  1, 0.02,  8, 14336, UNTIED | dict(
        rotary_base=1_000_000.0, num_experts=8, moe_aux_loss_coeff=0.01)),
    ("qwen3-30b-a3b", 151936, 48, 2048, 32, 4096, 3e-4,    512,  1, 0.02,  4,  6144, QWEN | dict(
        untie_embeddings_and_output_weights=True, kv_channels=128, qk_layernorm=True, num_experts=128,
        moe_router_topk=8, moe_ffn_hidden_size=768, moe_aux_loss_coeff=0.001)),
    ("smollm2-135m",   49152, 30,  576,  9, 2048, 3e-3,    512,  8, 0.04,  3,  1536, LLAMA | dict(rotary_base=1e5)),
)
PRESETS = {name: family | dict(zip(FIELDS, sizes)) for name, _, *sizes, family in TABLE}
# for estimates without data (bench.py plan); training takes the vocabulary size from its data
PUBLISHED_VOCABULARIES = {name: vocabulary for name, vocabulary, *_ in TABLE if vocabulary}

FINETUNE_BATCH_SIZE = 16     # the largest default of global_batch_size with --finetune; a preset's suits pre-training
FINETUNE_LR_DIVISOR = 10     # a smaller lr too: in 20 steps at the preset's 3e-3, SmolLM2's loss rose from 1.8 to 3.6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

# {ranks per replica: (tp, pp)} for runs that set neither tp nor pp. From 4 ranks on, use both together where possible;
# avoid a dp of 3, 5 or 7, which rarely divides the batch.
DEFAULT_LAYOUTS = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 5: (1, 5), 6: (2, 3), 7: (1, 7), 8: (4, 2)}
