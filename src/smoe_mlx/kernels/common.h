// Codes are used where they stand in their 32-bit word: masked, not shifted. The number that a code
// meets was divided by 2^position beforehand, which is exact. Affine codes count from the middle of
// their range, and offsets are those of the middle: sums stay small, and so does their error.
//
// HOW a code becomes a float. CONVERT: by the instruction for it, which runs at a fraction of the
// others' rate. ADD: as the low bits of 2^23, which is subtracted again, exact; for codes in the
// low 16 bits, to which the upper half of a word is shifted. FP4: e2m1, times 2^-14; FP8: e4m3, times
// 2^-8; NVFP4: as FP4, and scales are e4m3, where the other two have e8m0.
#define SM_INFINITY SM_AS_FLOAT(0x7f800000u)
enum { SM_CONVERT, SM_ADD, SM_FP4, SM_FP8, SM_NVFP4 };

// What a lane takes of a row at a time: codes, and what their groups have.
template <int LOADS, int PARTS>
struct sm_chunk {
  uint32_t w[4 * LOADS];
  float scale[PARTS];
  float offset[PARTS];
};

// A number of 8 bits (e4m3), times 2^-8.
SM_FN float sm_e4m3(uint32_t u) {
  const uint32_t v = u & 127u; // 127 is NaN
  return SM_HALF_AS_FLOAT((v << 7) | (((v + 1u) >> 7) << 14) | ((u & 128u) << 8));
}

// The scale of a group: a float, or 8 bits, with what codes lack.
template <int HOW, class S>
SM_FN float sm_scale(S s) {
  return float(s);
}

template <int HOW>
SM_FN float sm_scale(unsigned char s) {
  if (HOW == SM_NVFP4) {
    return sm_e4m3(uint32_t(s)) * 4194304.0f;
  }
  return SM_AS_FLOAT(uint32_t(s) << 23) * (HOW == SM_FP8 ? 256.0f : 16384.0f);
}

// Read chunk c of a row that has CHUNKS of them, each in PARTS groups, or SPAN of them in a group.
// MIDDLE: of the range of codes.
template <int HOW, int MIDDLE, int CHUNKS, int SPAN, int LOADS, int PARTS, class S, class B>
SM_FN void sm_fetch(
    SM_THREAD sm_chunk<LOADS, PARTS>& q,
    const SM_DEVICE uint4* codes,
    S scales,
    B offsets,
    size_t row,
    uint32_t c) {
  SM_UNROLL
  for (int i = 0; i < LOADS; i++) {
    const uint4 v = codes[(row * uint32_t(CHUNKS) + c) * uint32_t(LOADS) + uint32_t(i)];
    q.w[4 * i] = v.x;
    q.w[4 * i + 1] = v.y;
    q.w[4 * i + 2] = v.z;
    q.w[4 * i + 3] = v.w;
  }
  SM_UNROLL
  for (int p = 0; p < PARTS; p++) {
    const size_t g = row * uint32_t(CHUNKS * PARTS / SPAN) +
        (PARTS > 1 ? c * uint32_t(PARTS) + uint32_t(p) : c / uint32_t(SPAN));
    q.scale[p] = sm_scale<HOW>(scales[g]);
    q.offset[p] = HOW >= SM_FP4 ? 0.0f : float(offsets[g]) + float(MIDDLE) * q.scale[p];
  }
}

// Where the code i of a chunk stands when it is masked. (One that lies across two words is put
// together and stands at 0.)
template <int BITS, int HOW>
SM_FN uint32_t sm_position(uint32_t i) {
  const uint32_t at = (i * uint32_t(BITS)) % (HOW == SM_ADD ? 16u : 32u);
  return HOW >= SM_FP4 || at + uint32_t(BITS) > 32u ? 0u : at;
}

// v / 2^position of code i.
template <int BITS, int HOW>
SM_FN float sm_place(float v, uint32_t i) {
  return v * SM_AS_FLOAT((127u - sm_position<BITS, HOW>(i)) << 23);
}

// Code i, less the middle if it is affine, times 2^position.
template <int BITS, int HOW, int LOADS, int PARTS>
SM_FN float sm_code(const SM_THREAD sm_chunk<LOADS, PARTS>& q, int i) {
  const uint32_t mask = (1u << BITS) - 1u;
  const uint32_t middle = 1u << (BITS - 1);
  const int word = i * BITS / 32;
  const int at = i * BITS % 32;
  if (HOW == SM_FP8) {
    return sm_e4m3(q.w[word] >> at);
  }
  if (HOW >= SM_FP4) {
    const uint32_t u = q.w[word] >> at;
    return SM_HALF_AS_FLOAT(((u & 7u) << 9) | ((u & 8u) << 12));
  }
  if (HOW == SM_ADD) {
    const uint32_t u = at < 16 ? q.w[word] : q.w[word] >> 16;
    return SM_AS_FLOAT(0x4b000000u | (u & (mask << (at % 16)))) -
        float(8388608 + (middle << (at % 16)));
  }
  if (at + BITS > 32) {
    return float(((q.w[word] >> at) | (q.w[word + 1] << (32 - at))) & mask) - float(middle);
  }
  return float(q.w[word] & (mask << at)) - float(middle << at);
}

// The sum over codes 4 * quad to 4 * quad + 3 of code * x, with x divided as said above.
template <int BITS, int HOW, int LOADS, int PARTS>
SM_FN float sm_dot4(const SM_THREAD sm_chunk<LOADS, PARTS>& q, int quad, float4 x) {
  float sum = x.x * sm_code<BITS, HOW>(q, 4 * quad);
  sum += x.y * sm_code<BITS, HOW>(q, 4 * quad + 1);
  sum += x.z * sm_code<BITS, HOW>(q, 4 * quad + 2);
  sum += x.w * sm_code<BITS, HOW>(q, 4 * quad + 3);
  return sum;
}

// The sum over COUNT neighbouring lanes; right in the first of them.
template <int COUNT>
SM_FN float sm_lane_sum(float v) {
  SM_UNROLL
  for (int step = COUNT / 2; step > 0; step /= 2) {
    v += SM_SHUFFLE_DOWN(v, step);
  }
  return v;
}

// Comparisons are written such that NaN stays NaN.
SM_FN float sm_at_most(float v, float limit) {
  return v > limit ? limit : v;
}

SM_FN float sm_at_least(float v, float limit) {
  return v < limit ? limit : v;
}

SM_FN float sm_sigmoid(float v) {
  return 1.0f / (1.0f + SM_EXP(-v));
}

SM_FN float sm_silu(float v) {
  return v / (1.0f + SM_EXP(-v));
}

// log(1 + exp(v)). Metal has no log1p: the quotient takes back what rounding 1 + e did.
SM_FN float sm_softplus(float v) {
  const float e = SM_EXP(v < 0.0f ? v : -v);
  const float u = 1.0f + e;
  const float tail = u == 1.0f ? e : SM_LOG(u) * (e / (u - 1.0f));
  return v > 0.0f ? v + tail : tail;
}

// GELU's forms, by MLX's names for them ("precise" and "tanh" are one).
SM_FN float sm_gelu_tanh(float v) {
  return 0.5f * v * (1.0f + SM_TANH(0.7978845608028654f * (v + 0.044715f * v * v * v)));
}

SM_FN float sm_gelu_precise(float v) {
  return sm_gelu_tanh(v);
}

SM_FN float sm_gelu_fast(float v) {
  return v * sm_sigmoid(1.702f * v);
}

// Exact to 1e-7: Metal has no erf. Abramowitz and Stegun 7.1.26, of the tail alone.
SM_FN float sm_gelu_none(float v) {
  const float x = (v < 0.0f ? -v : v) * 0.7071067811865476f;
  const float t = 1.0f / (1.0f + 0.3275911f * x);
  float sum = 1.061405429f * t - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  const float tail = 0.5f * sum * t * SM_EXP(-x * x);
  return v * (v < 0.0f ? tail : 1.0f - tail);
}
