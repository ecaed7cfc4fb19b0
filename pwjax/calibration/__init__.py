"""Calibration: what `prepare` measures on text, a layer at a time, in forward passes only.

How `prepare` uses it (arrays may be NumPy or JAX; float32 inside, whatever the weights' dtype):

    tokens = token_windows(texts, encode, num_sequences=.., sequence_tokens=.., end_id=.., bos_id=..)   # int32 [n, T]
    walker = CalibrationWalker(config, tokens, dense["model.embed_tokens.weight"], loss_sequences=16)
    for layer in range(config.num_layers):                  # the tensors of one layer at a time are enough
        if not config.moe_layers[layer]:
            walker.pass_dense_layer(layer, dense_of(layer))
            continue
        experts = gate_up, down                             # [E, 2I, H], [E, H, I]
        statistics = walker.observe(layer, dense_of(layer), experts)
        ... quantize with statistics.importance[unit] [E, K] ...
        quantized = lambda unit, bits: ...                  # float32 [E, N, K], dequantized
        raw[m] = np.stack([raw_sensitivity(experts[u], functools.partial(quantized, u), statistics.importance[u])
                           for u in (0, 1)], axis=1)        # [E, 2, 6]
        walker.advance(experts, quantized)
    losses = walker.losses(dense)                           # model.norm.weight and the output head
    kappa = fit_kappa(losses, raw)                          # raw [L, E, 2, 6]
    table = sensitivity(kappa, raw)                         # float32 [L, E, 2, 6]
    max_bits = choose_max_bits(losses)

An interrupted `prepare` walks from layer 0 again with the quantized weights that it finds on disk; the numbers are the
same, since nothing here is random.
"""

from pwjax.calibration.sensitivity import Kappa, choose_max_bits, fit_kappa, raw_sensitivity, sensitivity
from pwjax.calibration.text import default_texts, load_texts, token_windows
from pwjax.calibration.walker import CalibrationLosses, CalibrationWalker, LayerStatistics

__all__ = [
    "CalibrationLosses",
    "CalibrationWalker",
    "Kappa",
    "LayerStatistics",
    "choose_max_bits",
    "default_texts",
    "fit_kappa",
    "load_texts",
    "raw_sensitivity",
    "sensitivity",
    "token_windows",
]
