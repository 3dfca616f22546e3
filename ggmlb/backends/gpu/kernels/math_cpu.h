/* Float functions in plain arithmetic, which compilers vectorise, for CPU-type devices, where a builtin is one call per
   element. Minimax polynomials; the error is below 4e-7, relative or absolute. */
DEVICE_FN float exp_(float x)
{
    const float c = x > 88.72283f ? 88.72283f : x < -87.33654f ? -87.33654f : x;
    const float t = c*1.44269504f;
    const int n = (int)(t + (t < 0.0f ? -0.5f : 0.5f));
    const float f = (float)n;
    const float r = (c - f*0.693359375f) + f*2.12194440e-4f;     /* c - f ln 2, with ln 2 in two parts, for accuracy */
    float p = 0.00139505963f;
    p = p*r + 0.00836895406f;
    p = p*r + 0.0416662060f;
    p = p*r + 0.166665182f;
    p = p*r + 0.5f;
    p = p*r*r + r + 1.0f;
    const float half_scale = AS_FLOAT((uint)(n + 126) << 23);    /* 2^(n-1), doubled below, because 2^128 overflows */
    const float y = p*half_scale*2.0f;
    return x > 88.72283f ? AS_FLOAT(0x7f800000u) : x < -87.33654f ? 0.0f : x != x ? x : y;
}

DEVICE_FN float round_(float x)     /* to the nearest integer; ties away from zero */
{
    const float t = TRUNC(x);
    return FABS(x - t) >= 0.5f ? t + (x < 0.0f ? -1.0f : 1.0f) : t;
}

DEVICE_FN float expm1_(float x)
{
    float p = 0.000199913484f;
    p = p*x + 0.00139975094f;
    p = p*x + 0.00833307859f;
    p = p*x + 0.0416653119f;
    p = p*x + 0.166666687f;
    p = p*x + 0.5f;
    return FABS(x) < 0.5f ? p*x*x + x : exp_(x) - 1.0f;
}

DEVICE_FN float tanh_(float x)
{
    const float t = x*x;
    float p = -0.00570871867f;
    p = p*t + 0.0206434671f;
    p = p*t - 0.0537414253f;
    p = p*t + 0.133314684f;
    p = p*t - 0.333332837f;
    const float y = 1.0f - 2.0f/(exp_(2.0f*FABS(x)) + 1.0f);
    return FABS(x) < 0.625f ? p*t*x + x : x < 0.0f ? -y : y;
}

DEVICE_FN float erf_(float x)
{
    const float c = x > 3.95f ? 3.95f : x < -3.95f ? -3.95f : x, t = c*c;
    float p = 1.96037302e-8f, q = 0.000979910371f;
    p = p*t - 1.95092866e-6f;
    p = p*t + 0.000143815763f;
    p = p*t + 0.00380810327f;
    p = p*t + 0.0509240851f;
    p = p*t + 0.202588961f;
    p = p*t + 1.12837911f;
    q = q*t + 0.0145762786f;
    q = q*t + 0.116097033f;
    q = q*t + 0.512871325f;
    q = q*t + 1.0f;
    const float y = c*p/q;      /* capped at 1, so that 1 - erf is not negative */
    return y > 1.0f ? 1.0f : y < -1.0f ? -1.0f : y;
}

#define ROUND(x) round_(x)
#define EXP(x)   exp_(x)
#define EXPM1(x) expm1_(x)
#define TANH(x)  tanh_(x)
#define ERF(x)   erf_(x)
