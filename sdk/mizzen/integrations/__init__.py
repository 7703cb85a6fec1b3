"""Integrations with training libraries. Each module needs its library and is imported only by the user.

| module | for |
| --- | --- |
| `torch` | plain training loops: a data loader that resumes at its position |
| `streams` | streams of samples with a position, such as shards |
| `ddp` | `DistributedDataParallel`: all ranks save, and exit, at the same step |
| `transformers` | the Trainer of Hugging Face |
| `lightning` | the Trainer of Lightning |
| `dcp` | torch's distributed checkpoints |
| `jax` | trees of arrays of JAX |
"""
