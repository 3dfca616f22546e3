/* Angle of a pair p in rotary position embedding, whose frequency has the given exponent; FACTORS divide frequencies. */
DEVICE_FN float angle_of(float position, float exponent, float factor, int p, int n_dims, float freq_base, float freq_scale,
                         float ext_factor, float ramp_low, float ramp_width)
{
    const float theta = position*POW(freq_base, -2.0f*exponent/(float)n_dims)/factor;
    const float ramp = ext_factor*(1.0f - FMIN(1.0f, FMAX(0.0f, ((float)p - ramp_low)/ramp_width)));
    return theta*(freq_scale*(1.0f - ramp) + ramp);
}
#ifdef FACTORS
#define FACTOR(p) LD(f, p, 0, 0, 0)
#else
#define FACTOR(p) 1.0f
#endif
