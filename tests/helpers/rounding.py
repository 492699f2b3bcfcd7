"""Bounds on what rounding in float32 may do, on every kind of CPU.

Kernels add up in an order that depends on the CPU, so a bound must not sit close to what one machine shows. Two ways to
compute the same thing have differed by at most 1.0e-5 nats in a log-prob (an AMD EPYC, a video; most by 1e-6) and by
3.5e-6 of its norm in a gradient. Errors that the tests make on purpose (positions of another rollout, a leak between
siblings, a wrong denominator, an adapter left out) change either by 1e-3 or more. Both bounds keep a factor of ten from
both sides. Tests of vLLM have a bound of their own, in `vllm_scenes.py`.
"""

LOGPROBS = 1e-4
"""Largest difference of a log-prob, in nats."""
GRADIENTS = 1e-4
"""Largest norm of a difference of gradients, over the norm of the gradient."""
