"""Teachers: who scores which trajectory, with what, and how the scores are checked before anybody trains on them.

`options` imports without torch, and so do `routing`, `scores`, `protocol` and `service`; `megatron_teacher` loads it.
"""
