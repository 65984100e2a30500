"""How good images are: FID, KID, precision and recall, LPIPS, PSNR, SSIM, and the energy of seams between tiles."""

from nearfield.methods import Borders
from nearfield_lab.quality.efficientnet import EfficientNet, load_efficientnet
from nearfield_lab.quality.fid import (
    Estimate,
    PrecisionRecall,
    Statistics,
    cosine_distance,
    features_of,
    frechet_distance,
    kernel_distance,
    precision_recall,
)
from nearfield_lab.quality.images import ImageSet, open_images
from nearfield_lab.quality.inception import Inception, load_inception
from nearfield_lab.quality.lpips import Lpips, load_lpips
from nearfield_lab.quality.results import QualityRow, pairs_kept, pareto_front
from nearfield_lab.quality.seams import SeamEnergy, line_gradients, seam_energy
from nearfield_lab.quality.similarity import psnr, ssim

__all__ = [
    "Borders",
    "EfficientNet",
    "Estimate",
    "ImageSet",
    "Inception",
    "Lpips",
    "PrecisionRecall",
    "QualityRow",
    "SeamEnergy",
    "Statistics",
    "cosine_distance",
    "features_of",
    "frechet_distance",
    "kernel_distance",
    "line_gradients",
    "load_efficientnet",
    "load_inception",
    "load_lpips",
    "open_images",
    "pairs_kept",
    "pareto_front",
    "precision_recall",
    "psnr",
    "seam_energy",
    "ssim",
]
