"""Open, check, resize and corrupt images and videos. No other package opens them."""

from mmrl.utils.torch_cpu_compat import tolerate_cuda_builds

# Beside a CPU build of torch, `import torchvision` fails unless this has run; modules of this package import it.
tolerate_cuda_builds()
