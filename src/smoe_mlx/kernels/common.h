// Codes are used where they stand in their 32-bit word: masked, not shifted. The number that a code
// meets was divided by 2^position beforehand, which is exact.

// Code 4 * quad of a word stands at bit 4 * quad * BITS: 2 to the minus that.
template <int BITS>
SM_FN float sm_quad_scale(uint32_t quad) {
  return 1.0f / float(1u << (4u * uint32_t(BITS) * quad));
}

// The sum over four neighbouring codes of a word of code * x, with x scaled as said above.
template <int BITS>
SM_FN float sm_dot4(uint32_t word, int quad, float4 x) {
  const uint32_t mask = (1u << BITS) - 1u;
  const int shift = 4 * BITS * quad;
  float sum = x.x * float(word & (mask << shift));
  sum += x.y * float(word & (mask << (shift + BITS)));
  sum += x.z * float(word & (mask << (shift + 2 * BITS)));
  sum += x.w * float(word & (mask << (shift + 3 * BITS)));
  return sum;
}

SM_FN uint32_t sm_word(uint4 chunk, int i) {
  return i == 0 ? chunk.x : (i == 1 ? chunk.y : (i == 2 ? chunk.z : chunk.w));
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

SM_FN float sm_gelu_tanh(float v) {
  return 0.5f * v * (1.0f + SM_TANH(0.7978845608028654f * (v + 0.044715f * v * v * v)));
}
