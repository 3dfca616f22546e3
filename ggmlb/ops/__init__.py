"""The op families: what each op takes, checks and gives; and its params, which the backends read.

A node holds its op's parameters in `Tensor.params`, under these names:

    ACC, SET               nb1, nb2, nb3, offset [bytes], inplace
    CLAMP                  min, max
    CONCAT                 dim
    DIAG_MASK_*            n_past
    GLU                    op (GluOp), swapped; SWIGLU_OAI: alpha, limit
    *_NORM, RMS_NORM_BACK  eps; GROUP_NORM: n_groups

An op without a line has no params. Sources keep ggml's order and places: an optional one that is absent is
None. A node that writes into an existing tensor (`view_src` is set, and the op is no view) has that tensor
among its sources.
"""
