"""What a quantized matrix holds, row by row: plain to read."""

from __future__ import annotations

import numpy as np

from jpaged.ops.quantized import QuantizedMatrix


def dequantized(w: QuantizedMatrix, dtype: type = np.float64) -> np.ndarray:
    """[in, out] in the order of the input."""
    data, scale = np.asarray(w.data), np.asarray(w.scale, dtype)
    zero = np.zeros(scale.shape, dtype) if w.zero is None else np.asarray(w.zero, dtype)
    num_rows, half = len(data) * 8 // w.bits, w.group // 2
    order = np.arange(num_rows) if w.order is None else np.asarray(w.order)
    out = np.empty((num_rows, data.shape[1]), dtype)
    for row in range(num_rows):
        group, place = divmod(row, w.group)
        if w.bits == 8:
            value = data[row].astype(dtype)
        else:
            byte = data[group * half + place % half]
            value = (byte >> 4 if place >= half else byte & 15).astype(dtype)
        out[order[row]] = (value - zero[group]) * scale[group]
    return out
