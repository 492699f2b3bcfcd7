"""The policy room: Qwen-VL models and their processors. The one package with an effect at import (see `compat`)."""

from mmrl.policy.compat import tolerate_cuda_builds

tolerate_cuda_builds()
