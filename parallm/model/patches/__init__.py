"""Everything that reaches into mlx-lm's code, or relies on how it is written. Look here first when mlx-lm is upgraded.

| what we reach into | where | why |
|---|---|---|
| `scaled_dot_product_attention` of models' modules | `forward.py` | attention of our own caches |
| `swiglu`, `precise_swiglu` of models' modules | `forward.py` | fused kernels, and a fast exp on x86-64 |
| class of `nn.Embedding` modules, on CUDA | `forward.py` | rows by a kernel that compiles quickly |
| `nn.RoPE` and `Llama3RoPE` modules, on CUDA | `rotary.py` | rotation inside the attention kernels |
| `x + self.mlp(...)`: the sum's right operand | `forward.py` | residual adds inside a LoRA kernel, or with their norm |
| `nn.RMSNorm` modules, on CUDA | `forward.py` | the norm after a residual add, in its kernel; no gradient of weights |
| the trunk as an attribute of the model | `forward.py` | hidden states without logits, logits without the trunk |
| linear layers of modules | `lora/targets.py`, `lora/linear.py` | LoRA; on CUDA layers share an array |
| classes of quantized layers | `quantized.py` | products on a CPU |
| `_gather_sort` of `switch_layers` | `experts.py` | the row of each token that experts compute |
| class of `SwitchLinear` modules, on CUDA | `experts.py` | products of sorted rows by a kernel |
| `SwitchLinear` modules | `lora/targets.py`, `lora/linear.py` | LoRA on experts |
| `cast_predicate` of models | `quantized.py` | arrays that keep their type |
| `gated_delta_update`, `ssm_update` of models' modules | `recurrence.py` | chunks with a backward, packed rows |
| depthwise `nn.Conv1d` modules of models with states | `recurrence.py` | the same; weights in order on a CPU |
| the name `nn` in modules of models with states | `recurrence.py` | silu of convolutions with a fast exp on x86-64 |
| `normalize_qk` of models' modules, on CUDA | `decode_step.py` | norms inside the kernel of a token |
| classes of gated delta layers, their norms and convolutions, on CUDA | `decode_step.py` | a token in a few kernels |
| `__call__` of layers that take a cache, in models with states | `recurrence.py` | packed rows as one row |
| `KVCache` of a layer | `engine/kv/cache.py`, `learner/passes/packing.py` | slots, packed sequences |
| `ArraysCache`, `CacheList` of a layer | `learner/passes/packing.py` | packed sequences |
| the trunk's list `layers` | `layers.py` | gradient checkpointing; a last layer of fewer tokens; trials |
| `TokenizerWrapper`, `TextStateMachine` | `chat/` | the tokenizer inside; reasoning and tool calls |
| `mlx_lm.utils._download` | `load.py` | hub ids |

A patch is installed once, when a model is loaded, and leaves alone what it does not know.
"""
