"""Mizzen in the libraries that people train with. Each module needs its library; nothing here is imported by another.

| module | for |
| --- | --- |
| `torch` | a plain loop: a loader that goes on where the training was |
| `ddp` | `DistributedDataParallel`: every rank saves, and leaves, at the same step |
| `transformers` | the Trainer of Hugging Face |
| `lightning` | the Trainer of Lightning |
"""
