  // ids, scores [tokens, TOP_K]: a token's experts and their weights, from its logits [tokens, E].
  //
  // BY_LOGITS: choose by logits, else by softmax as rounded to T. Of equal ones the first is chosen,
  // with LAST the last, and the order is then ascending: what mlx-lm's argpartition does, which
  // sorts on a GPU. NORM: scores add up to 1, else they are softmax over all experts.
  // grid: y = token; one simdgroup.
  constexpr int OWN = (E + 31) / 32; // experts of a lane: lane, lane + 32, ...
  const uint32_t start = sm_y * uint32_t(E);
  float most = -SM_INFINITY;
  float v[OWN];
  SM_UNROLL
  for (int j = 0; j < OWN; j++) {
    const uint32_t e = uint32_t(32 * j) + sm_lane;
    v[j] = e < uint32_t(E) ? float(logits[start + e]) : -SM_INFINITY;
    most = v[j] > most ? v[j] : most;
  }
  SM_UNROLL
  for (int m = 16; m > 0; m /= 2) {
    const float other = SM_SHUFFLE_XOR(most, m);
    most = other > most ? other : most;
  }
  float key[OWN];
  float total = 0.0f;
  SM_UNROLL
  for (int j = 0; j < OWN; j++) {
    key[j] = v[j];
    v[j] = SM_EXP(v[j] - most);
    total += v[j];
  }
  SM_UNROLL
  for (int m = 16; m > 0; m /= 2) {
    total += SM_SHUFFLE_XOR(total, m);
  }
  uint32_t left = 0u; // bit j: expert j of this lane can still be chosen
  SM_UNROLL
  for (int j = 0; j < OWN; j++) {
    left |= uint32_t(32 * j) + sm_lane < uint32_t(E) ? 1u << j : 0u;
    if (!BY_LOGITS) {
      key[j] = float(static_cast<T>(v[j] / total));
    }
  }

  uint32_t my_id = 0u; // of the place sm_lane
  float my_score = 0.0f;
  float chosen = 0.0f;
  for (int k = 0; k < TOP_K; k++) {
    float best = -SM_INFINITY;
    uint32_t id = 0xffffffffu; // nothing: anything is better
    SM_UNROLL
    for (int j = 0; j < OWN; j++) {
      const bool better = id == 0xffffffffu || key[j] > best || (LAST && key[j] == best);
      if ((left >> j & 1u) && better) {
        best = key[j];
        id = uint32_t(32 * j) + sm_lane;
      }
    }
    SM_UNROLL
    for (int m = 16; m > 0; m /= 2) {
      const float other = SM_SHUFFLE_XOR(best, m);
      const uint32_t other_id = SM_SHUFFLE_XOR(id, m);
      const bool same = other == best && (LAST ? other_id > id : other_id < id);
      if (other_id != 0xffffffffu && (id == 0xffffffffu || other > best || same)) {
        best = other;
        id = other_id;
      }
    }
    // The first lane's, should NaN have made them differ.
    id = SM_SHUFFLE(id, 0);
    float score = 0.0f;
    SM_UNROLL
    for (int j = 0; j < OWN; j++) {
      if (uint32_t(32 * j) + sm_lane == id) {
        score = v[j];
        left &= ~(1u << j);
      }
    }
    score = SM_SHUFFLE(score, id % 32u);
    chosen += score;
    if (sm_lane == uint32_t(LAST ? TOP_K - 1 - k : k)) {
      my_id = id;
      my_score = score;
    }
  }
  const float sum = NORM && total == total ? chosen : total; // NaN stays NaN
  if (sm_lane < uint32_t(TOP_K)) {
    ids[sm_y * uint32_t(TOP_K) + sm_lane] = my_id;
    scores[sm_y * uint32_t(TOP_K) + sm_lane] = static_cast<T>(my_score / sum);
  }
