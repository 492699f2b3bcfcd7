"""The model in training: model families, processors, batches, layers of a packed row, and adapters.

It changes torchvision at import, see `mmrl.utils.torch_cpu_compat`.
"""

from mmrl.utils.torch_cpu_compat import tolerate_cuda_builds

tolerate_cuda_builds()
