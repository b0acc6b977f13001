  // out[pair, row] = sm_activation(up, gate) of rows of the expert in slot[pair], for one input row.
  // A slot that the bank does not have (say 0xffffffff: not in memory) gives 0 and reads nothing.
  //
  // inp     [tokens, K] if PER_TOKEN, else [pairs, K]; pair = token * top-k + place
  // slot    [tokens, top-k]: numbers of slots, or with LOOKUP of experts, whose slots lookup [E] has
  // wu su bu au, wg sg bg ag: codes [slots, N, K * BITS / 32], scales and offsets of groups
  //         [slots, N, K / GROUP], bias [slots, N]; the second set only if GATED, bias only if BIAS
  // out     [pairs, N]; with NEXT its rows in the order in which sum.h takes them, NEXT numbers a chunk
  // grid: y = pair, x = block of rows; SIMDS simdgroups. LANES lanes share a row, each takes a chunk
  // of it at a time, and ROWS such rows.
  constexpr int LOADS = 32 % BITS == 0 ? 1 : BITS;                  // of 16 bytes, in a chunk
  constexpr int CODES = 128 * LOADS / BITS;                         // in a chunk
  constexpr int QUADS = CODES / 4;                                  // a quad: four codes
  constexpr int CHUNKS = K / CODES;                                 // in a row
  constexpr int PARTS = CODES > GROUP ? CODES / GROUP : 1;          // groups in a chunk
  constexpr int PART = QUADS / PARTS;                               // quads of one group in a chunk
  constexpr int SPAN = GROUP > CODES ? GROUP / CODES : 1;           // chunks in a group
  constexpr int BESIDE = 32 / LANES;                                // rows side by side
  SM_SHARED(float4, xs, QUADS * CHUNKS); // transposed, so that neighbouring lanes read neighbours
  SM_SHARED(float, xsum, PARTS * CHUNKS);

  const uint32_t tokens_row = PER_TOKEN ? sm_y / uint32_t(slot_shape[1]) : sm_y;
  const uint32_t number = uint32_t(slot[sm_y]);
  const uint32_t expert = LOOKUP ? uint32_t(lookup[number]) : number;
  const bool there = expert < uint32_t(wu_shape[0]);

  for (uint32_t start = 0u; start < uint32_t(K / 4); start += uint32_t(SIMDS * 32)) {
    const uint32_t i = start + sm_thread;
    float4 v = SM_FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i < uint32_t(K / 4)) {
      const size_t at = size_t(tokens_row) * uint32_t(K) + 4u * i;
      v = SM_FLOAT4(float(inp[at]), float(inp[at + 1]), float(inp[at + 2]), float(inp[at + 3]));
    }
    const float sum = sm_lane_sum<PART>((v.x + v.y) + (v.z + v.w));
    if (i < uint32_t(K / 4)) {
      const uint32_t c = 4u * (i % uint32_t(QUADS));
      xs[(i % uint32_t(QUADS)) * uint32_t(CHUNKS) + i / uint32_t(QUADS)] = SM_FLOAT4(
          (sm_place<BITS, HOW>(v.x, c)), (sm_place<BITS, HOW>(v.y, c + 1u)),
          (sm_place<BITS, HOW>(v.z, c + 2u)), (sm_place<BITS, HOW>(v.w, c + 3u)));
      if (i % uint32_t(PART) == 0u) {
        xsum[i / uint32_t(PART)] = sum;
      }
    }
  }
  SM_BARRIER();

  const uint32_t first = (sm_block * SIMDS + sm_simd) * uint32_t(BESIDE * ROWS) + sm_lane / LANES;
  const uint32_t lane = sm_lane % LANES;
  size_t line[ROWS];
  float up[ROWS];
  float gate[ROWS];
  SM_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const uint32_t row = first + uint32_t(r * BESIDE);
    line[r] = size_t(there ? expert : 0u) * uint32_t(N) + (row < uint32_t(N) ? row : 0u);
    up[r] = 0.0f;
    gate[r] = 0.0f;
  }
  if (there) {
    const SM_DEVICE uint4* wu4 = (const SM_DEVICE uint4*)wu;
    const SM_DEVICE uint4* wg4 = (const SM_DEVICE uint4*)wg;
    SM_UNROLL_AHEAD
    for (uint32_t c = lane; c < uint32_t(CHUNKS); c += uint32_t(LANES)) {
      sm_words<4 * LOADS> qu[ROWS];
      sm_words<4 * LOADS> qg[ROWS];
      SM_UNROLL
      for (int r = 0; r < ROWS; r++) {
        SM_UNROLL
        for (int i = 0; i < LOADS; i++) {
          const size_t at = (line[r] * uint32_t(CHUNKS) + c) * uint32_t(LOADS) + uint32_t(i);
          const uint4 u = SM_LOAD16(wu4, at);
          qu[r].w[4 * i] = u.x;
          qu[r].w[4 * i + 1] = u.y;
          qu[r].w[4 * i + 2] = u.z;
          qu[r].w[4 * i + 3] = u.w;
          if (GATED) {
            const uint4 g = SM_LOAD16(wg4, at);
            qg[r].w[4 * i] = g.x;
            qg[r].w[4 * i + 1] = g.y;
            qg[r].w[4 * i + 2] = g.z;
            qg[r].w[4 * i + 3] = g.w;
          }
        }
      }
      SM_UNROLL
      for (int p = 0; p < PARTS; p++) {
        float du[ROWS];
        float dg[ROWS];
        SM_UNROLL
        for (int r = 0; r < ROWS; r++) {
          du[r] = 0.0f;
          dg[r] = 0.0f;
        }
        SM_UNROLL
        for (int j = p * PART; j < (p + 1) * PART; j++) {
          const float4 x = xs[uint32_t(j * CHUNKS) + c];
          SM_UNROLL
          for (int r = 0; r < ROWS; r++) {
            du[r] += sm_dot4<BITS, HOW>(qu[r], j, x);
            if (GATED) {
              dg[r] += sm_dot4<BITS, HOW>(qg[r], j, x);
            }
          }
        }
        const float sum = xsum[c * uint32_t(PARTS) + uint32_t(p)];
        SM_UNROLL
        for (int r = 0; r < ROWS; r++) {
          const size_t g = line[r] * uint32_t(K / GROUP) +
              (PARTS > 1 ? c * uint32_t(PARTS) + uint32_t(p) : c / uint32_t(SPAN));
          up[r] += sm_scale(su[g]) * du[r];
          if (GATED) {
            gate[r] += sm_scale(sg[g]) * dg[r];
          }
          if (HOW != SM_FP4) {
            up[r] += float(bu[g]) * sum;
            if (GATED) {
              gate[r] += float(bg[g]) * sum;
            }
          }
        }
      }
    }
  }
  SM_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const uint32_t row = first + uint32_t(r * BESIDE);
    float u = sm_lane_sum<LANES>(up[r]);
    float g = GATED ? sm_lane_sum<LANES>(gate[r]) : 0.0f;
    if (lane == 0u && row < uint32_t(N)) {
      if (BIAS && there) {
        u += float(au[line[r]]);
        if (GATED) {
          g += float(ag[line[r]]);
        }
      }
      constexpr uint32_t C = NEXT ? NEXT : 4;
      const uint32_t at = NEXT ? (row % C / 4u * (uint32_t(N) / C) + row / C) * 4u + row % 4u : row;
      out[size_t(sm_y) * uint32_t(N) + at] = static_cast<T>(there ? sm_activation(u, g) : 0.0f);
    }
  }
