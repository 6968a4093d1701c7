// SPDX-License-Identifier: Apache-2.0
/* What messages and info() call the format's numbers. */
#ifndef CSA_NAMES_H
#define CSA_NAMES_H

#include "bundle.h"

static inline const char *csa_operation_name(int32_t operation) {
  return operation == CSA_FORWARD ? "forward" : operation == CSA_BACKWARD ? "backward" : "finish";
}

/* 0 is that of what finishes a backward, which has none of csa_args.dtype's. */
static inline const char *csa_dtype_name(int32_t dtype) {
  static const char *const NAMES[] = {"f32", "bf16", "fp16", "fp32"};
  return NAMES[dtype >= 0 && dtype <= 3 ? dtype : 0];
}

static inline const char *csa_kind_name(int32_t kind) {
  static const char *const NAMES[] = {"finish", "short", "long", "buffered", "early"};
  return NAMES[kind >= CSA_NO_WINDOW && kind <= CSA_EARLY ? kind : CSA_NO_WINDOW];
}

#endif
