"""The product of a LoRA adapter.

The weight stays quantised; two float32 matrices of low rank are added to its product: `W x + s B (A x)`.
The adapter is applied, changed and switched off without changing the weight. Text models do this with
adapter files: [adapters](../text-models.md#adapters).
"""

import numpy as np

import ggmlb

rng = np.random.default_rng(0)
W = rng.standard_normal((96, 64), np.float32)  # NumPy's order: 96 outputs, 64 inputs
A = rng.standard_normal((4, 64), np.float32)  # rank 4
B = rng.standard_normal((96, 4), np.float32)
X = rng.standard_normal((5, 64), np.float32)

ctx = ggmlb.Context()
w = ctx.from_array(W, "q8_0", name="w")
a, b = ctx.from_array(A, name="a"), ctx.from_array(B, name="b")
x = ctx.from_array(X, name="x")
scale = ctx.new_tensor("f32", 1, name="scale")
change = ctx.mul(ctx.mul_mat(b, ctx.mul_mat(a, x)), scale)
y = ctx.add(ctx.mul_mat(w, x), change)

merged = w.to_numpy() + 0.5 * B @ A
result = ggmlb.evaluate(y, {"scale": [0.5]}, devices="CPU")
print("result", result.shape)
print("as the merged weight:", np.allclose(result, X @ merged.T, rtol=0.02, atol=0.2))

plain = ggmlb.evaluate(y, {"scale": [0]}, devices="CPU")
print("scale 0 is the weight alone:", np.allclose(plain, X @ w.to_numpy().T, rtol=0.02, atol=0.2))
