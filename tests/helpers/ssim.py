"""Structural similarity of two pictures, slowly."""

import numpy as np


def slow_ssim(first, second):
    """Wang et al. 2004, eq. 13, window by window: a Gaussian of 11 x 11, sigma 1.5, averaged where it fits."""
    a, b = (image @ np.array([0.299, 0.587, 0.114]) for image in (first, second))
    offsets = np.arange(-5, 6)
    line = np.exp(-(offsets**2) / (2 * 1.5**2))
    window = np.outer(line, line) / line.sum() ** 2
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    found = []
    for y in range(5, a.shape[0] - 5):
        for x in range(5, a.shape[1] - 5):
            p, q = (image[y - 5 : y + 6, x - 5 : x + 6] for image in (a, b))
            m, n = (window * p).sum(), (window * q).sum()
            vp, vq = (window * (p - m) ** 2).sum(), (window * (q - n) ** 2).sum()
            cov = (window * (p - m) * (q - n)).sum()
            found.append((2 * m * n + c1) * (2 * cov + c2) / ((m**2 + n**2 + c1) * (vp + vq + c2)))
    return np.mean(found)
