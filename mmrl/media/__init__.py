"""The only room that opens pictures and videos. It has an effect at import (see `compat`)."""

from mmrl.utils.torch_cpu_compat import tolerate_cuda_builds

tolerate_cuda_builds()
