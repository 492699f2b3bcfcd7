"""Dataset functions: each takes a `DatasetContext` and options, and yields samples."""

from mmrl_datasets.media_files import RenderedVideo as RenderedVideo
from mmrl_datasets.media_files import image_ref as image_ref
from mmrl_datasets.media_files import save_mp4 as save_mp4
from mmrl_datasets.media_files import save_png as save_png
from mmrl_datasets.media_files import video_ref as video_ref
