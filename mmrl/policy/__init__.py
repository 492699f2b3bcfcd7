"""The policy room: Qwen-VL models and their processors. It has an effect at import (see `compat`)."""

from mmrl.utils.torch_cpu_compat import tolerate_cuda_builds

tolerate_cuda_builds()
