// Matrix products of a simdgroup: 16 x 8 float32 sums += 16 x 16 numbers of T * (8 x 16 of T)^T.
// A lane has sums 0 and 1 in two columns of a row, and 2 and 3 eight rows below.
#define SM_GROUP
#ifndef SM_MMA
#define SM_MMA(kind, c, a, b) \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." kind "." kind ".f32 " \
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#endif

struct sm_sums {
  float v[4];
};

template <class T>
struct sm_left {
  uint32_t w[4];
};

template <class T>
struct sm_right {
  uint32_t w[2];
};

SM_FN uint32_t sm_fragment_row(uint32_t lane) {
  return lane / 4u;
}

SM_FN uint32_t sm_fragment_column(uint32_t lane) {
  return lane % 4u * 2u;
}

SM_FN void sm_clear(sm_sums& c) {
  c.v[0] = c.v[1] = c.v[2] = c.v[3] = 0.0f;
}

SM_FN float sm_sum(const sm_sums& c, int i) {
  return c.v[i];
}

template <class T>
SM_FN void sm_load(sm_left<T>& a, const T* from, int line, uint32_t lane) {
  const uint32_t* w = (const uint32_t*)(from + lane / 4u * uint32_t(line) + lane % 4u * 2u);
  a.w[0] = w[0];
  a.w[1] = w[4 * line];
  a.w[2] = w[4];
  a.w[3] = w[4 * line + 4];
}

template <class T>
SM_FN void sm_load(sm_right<T>& b, const T* from, int line, uint32_t lane) {
  const uint32_t* w = (const uint32_t*)(from + lane / 4u * uint32_t(line) + lane % 4u * 2u);
  b.w[0] = w[0];
  b.w[1] = w[4];
}

SM_FN void sm_multiply(sm_sums& c, const sm_left<__half>& a, const sm_right<__half>& b) {
  SM_MMA("f16", c.v, a.w, b.w);
}

SM_FN void sm_multiply(
    sm_sums& c, const sm_left<__nv_bfloat16>& a, const sm_right<__nv_bfloat16>& b) {
  SM_MMA("bf16", c.v, a.w, b.w);
}

// Two numbers as T, in 32 bits.
template <class T>
SM_FN uint32_t sm_pair(float a, float b);

template <>
SM_FN uint32_t sm_pair<__half>(float a, float b) {
  const __half2 v = __floats2half2_rn(a, b);
  return *(const uint32_t*)&v;
}

template <>
SM_FN uint32_t sm_pair<__nv_bfloat16>(float a, float b) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *(const uint32_t*)&v;
}
