/* Element functions by ggml op name in lower case: of map (fn_), combine (fn2_) and glu (glu_). */
/* NaN inputs give what ggml gives, sometimes a number: comparisons with NaN are false. FMIN and FMAX differ by compiler. */
#define FN_(name, expr) DEVICE_FN float fn_##name(float x, float p0, float p1, float p2, float p3) { return (expr); }
DEVICE_FN float gelu_tanh(float x) 
{
    return x < -100.0f ? 0.0f : 0.5f*x*(1.0f + TANH(0.797884561f*x*(1.0f + 0.044715f*x*x)));  /* 0, not NaN, for x = -inf */
}
DEVICE_FN float sigmoid(float x) { return 1.0f/(1.0f + EXP(-x)); }
DEVICE_FN float softplus(float x) { return x > 20.0f ? x : LOG1P(EXP(x)); }
DEVICE_FN float gelu_quick(float x) { return x*sigmoid(1.702f*x); }
DEVICE_FN float gelu_erf(float x) { return 0.5f*x*(1.0f + ERF(0.707106781f*x)); }
DEVICE_FN float relu(float x) { return x > 0.0f ? x : 0.0f; }
DEVICE_FN float at_most(float x, float top) { return x > top ? top : x; }
DEVICE_FN float at_least(float x, float low) { return x < low ? low : x; }
DEVICE_FN float hardsigmoid(float x) { const float y = (x + 3.0f)/6.0f; return y > 0.0f ? at_most(y, 1.0f) : 0.0f; }
DEVICE_FN float clamped(float x, float low, float top) { const float y = x < top ? x : top; return y > low ? y : low; }
DEVICE_FN float silu(float x) { return x*sigmoid(x); }
DEVICE_FN float xielu(float x, float alpha_n, float alpha_p, float beta, float eps)
{
    return x > 0.0f ? alpha_p*x*x + beta*x : (EXPM1(at_most(x, eps)) - x)*alpha_n + beta*x;
}

FN_(abs, FABS(x))
FN_(sgn, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f)
FN_(neg, -x)
FN_(step, x > 0.0f ? 1.0f : 0.0f)
FN_(tanh, TANH(x))
FN_(elu, x > 0.0f ? x : EXPM1(x))
FN_(relu, relu(x))
FN_(sigmoid, sigmoid(x))
FN_(gelu, gelu_tanh(x))
FN_(gelu_quick, gelu_quick(x))
FN_(silu, silu(x))
FN_(hardswish, x*hardsigmoid(x))
FN_(hardsigmoid, hardsigmoid(x))
FN_(exp, EXP(x))
FN_(expm1, EXPM1(x))
FN_(softplus, softplus(x))
FN_(gelu_erf, gelu_erf(x))
FN_(xielu, xielu(x, p0, p1, p2, p3))
FN_(floor, FLOOR(x))
FN_(ceil, CEIL(x))
FN_(round, ROUND(x))
FN_(trunc, TRUNC(x))
FN_(sqr, x*x)
FN_(sqrt, SQRT(x))
FN_(log, LOG(x))
FN_(sin, SIN(x))
FN_(cos, COS(x))
FN_(scale, FMA(x, p0, p1))
FN_(clamp, clamped(x, p0, p1))
FN_(leaky_relu, x > 0.0f ? x : x < 0.0f ? p0*x : 0.0f)

#define FN2_(name, expr) DEVICE_FN float fn2_##name(float x, float y) { return (expr); }
FN2_(add, x + y)
FN2_(sub, x - y)
FN2_(mul, x*y)
FN2_(div, x/y)
DEVICE_FN float fn2_silu_back(float dy, float x) { const float s = sigmoid(x); return dy*s*(1.0f + x*(1.0f - s)); }

#define GLU_(name, expr) DEVICE_FN float glu_##name(float x, float g, float alpha, float limit) { return (expr); }
GLU_(reglu, x > 0.0f ? x*g : 0.0f)
GLU_(geglu, gelu_tanh(x)*g)
GLU_(swiglu, silu(x)*g)
GLU_(geglu_erf, gelu_erf(x)*g)
GLU_(geglu_quick, gelu_quick(x)*g)
GLU_(swiglu_clamp, silu(at_most(x, limit))*at_most(at_least(g, -limit), limit))
GLU_(swiglu_oai, at_most(x, limit)*sigmoid(alpha*at_most(x, limit))*(at_most(at_least(g, -limit), limit) + 1.0f))
