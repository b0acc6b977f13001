// Matrix products of a simdgroup: 16 x 8 float32 sums += 16 x 16 numbers of T * (8 x 16 of T)^T.
// A lane has sums 0 and 1 in two columns of a row, and 2 and 3 eight rows below.
#define SM_GROUP threadgroup

struct sm_sums {
  simdgroup_matrix<float, 8, 8> m[2];
};

template <class T>
struct sm_left {
  simdgroup_matrix<T, 8, 8> m[4];
};

template <class T>
struct sm_right {
  simdgroup_matrix<T, 8, 8> m[2];
};

SM_FN uint32_t sm_fragment_row(uint32_t lane) {
  return (lane / 4u & 4u) + lane / 2u % 4u;
}

SM_FN uint32_t sm_fragment_column(uint32_t lane) {
  return (lane / 4u & 2u) * 2u + lane % 2u * 2u;
}

SM_FN void sm_clear(SM_THREAD sm_sums& c) {
  c.m[0] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  c.m[1] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

SM_FN float sm_sum(SM_THREAD sm_sums& c, int i) {
  return c.m[i / 2].thread_elements()[i % 2];
}

template <class T>
SM_FN void sm_load(SM_THREAD sm_left<T>& a, const threadgroup T* from, int line, uint32_t lane) {
  simdgroup_load(a.m[0], from, ulong(line));
  simdgroup_load(a.m[1], from + 8, ulong(line));
  simdgroup_load(a.m[2], from + 8 * line, ulong(line));
  simdgroup_load(a.m[3], from + 8 * line + 8, ulong(line));
}

template <class T>
SM_FN void sm_load(SM_THREAD sm_right<T>& b, const threadgroup T* from, int line, uint32_t lane) {
  simdgroup_load(b.m[0], from, ulong(line), ulong2(0, 0), true);
  simdgroup_load(b.m[1], from + 8, ulong(line), ulong2(0, 0), true);
}

template <class T>
SM_FN void sm_multiply(
    SM_THREAD sm_sums& c, SM_THREAD sm_left<T>& a, SM_THREAD sm_right<T>& b) {
  SM_UNROLL
  for (int i = 0; i < 4; i++) {
    simdgroup_multiply_accumulate(c.m[i / 2], a.m[i], b.m[i % 2], c.m[i / 2]);
  }
}

// Two numbers as T, in 32 bits.
template <class T>
SM_FN uint32_t sm_pair(float a, float b) {
  return uint32_t(as_type<ushort>(T(a))) | (uint32_t(as_type<ushort>(T(b))) << 16);
}
