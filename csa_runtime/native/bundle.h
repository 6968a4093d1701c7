// SPDX-License-Identifier: Apache-2.0
/* bundle.bin: variants, schedules and images, as `aot/bundle.py` packs them. All numbers are little
 * endian, offsets count from the start of the file, strings are padded with NULs. */
#ifndef CSA_BUNDLE_H
#define CSA_BUNDLE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { CSA_BUNDLE_SCHEMA = 3, CSA_MAX_PARAMETERS = 24, CSA_MAX_FAMILIES = 128 };
enum csa_operation { CSA_FORWARD = 1, CSA_BACKWARD = 2, CSA_FINISH = 3 };

/* Short: a thread holds a row's whole window. Long: a block's warps share it. Buffered: as short,
 * but a warp takes one row at a time. Early: as short, but a warp of one row loads its window
 * before it has found it. */
enum csa_kind { CSA_NO_WINDOW = 0, CSA_SHORT = 1, CSA_LONG = 2, CSA_BUFFERED = 3, CSA_EARLY = 4 };

/* Kernel parameters. The numbers are part of the format: append, never renumber. */
enum csa_parameter {
  /* pointers */
  CSA_KV,
  CSA_SCORE,
  CSA_APE,
  CSA_CU_SEQLENS,
  CSA_CU_SEQLENS_COMP,
  CSA_OUT,
  CSA_GRAD_OUT,
  CSA_GRAD_KV,
  CSA_GRAD_SCORE,
  CSA_GRAD_APE,
  CSA_WORKSPACE,
  /* int64 */
  CSA_KV_STRIDE,
  CSA_SCORE_STRIDE,
  CSA_OUT_STRIDE,
  CSA_GRAD_OUT_STRIDE,
  CSA_GRAD_KV_STRIDE,
  CSA_GRAD_SCORE_STRIDE,
  CSA_PLANE_ELEMENTS,
  /* int32 */
  CSA_TOKENS,
  CSA_SEGMENTS,
  CSA_ROWS,
  CSA_HEAD_DIM,
  CSA_LANES_LOG2,
  CSA_COLUMN_TILES,
  CSA_GROUPS,
  CSA_FILL_CTAS,
  CSA_ACCUMULATE,
  CSA_RATIO,
  CSA_COFF,
  CSA_PARAMETER_COUNT
};

/* Bytes of a parameter, which is also its alignment. */
static inline uint32_t csa_parameter_bytes(uint8_t id) { return id < CSA_TOKENS ? 8 : 4; }

struct csa_header {
  char magic[8];
  uint32_t schema, header_bytes;
  uint64_t total_bytes;
  uint32_t variant_count, schedule_count, image_count, reserved;
  uint64_t variants, schedules, images; /* offsets */
  uint8_t tables_sha256[32];            /* of the bytes from the header to the tables' end */
  uint8_t pad[32];
};

struct csa_variant {
  char name[60];
  int32_t rows; /* consecutive rows of a thread; only of short forward ones more than 1 */
  int32_t operation, ratio, coff, dtype;
  int32_t columns; /* of a thread; finish: elements of grad_ape of a block */
  int32_t threads, dynamic_shared;
  uint32_t parameter_count;
  int32_t kind, alignment; /* alignment in elements: of 16-bit bases, row strides, head_dim */
  uint8_t parameters[CSA_MAX_PARAMETERS];
};

struct csa_schedule {
  int32_t arch, operation, ratio, coff, dtype, variant, lanes_log2, ctas, fill_ctas;
  int32_t max_rows_per_segment; /* rows at most this many times the segments; -1, finish: any */
  int64_t max_elements;         /* rows * head_dim at most, finish: of a plane; -1: any */
  uint8_t pad[16];
};

struct csa_image {
  int32_t variant, arch, registers, static_shared;
  uint32_t flags, reserved;
  uint64_t offset, bytes;
  uint8_t sha256[32];
  char symbol[96];
  uint8_t pad[24];
};

_Static_assert(sizeof(struct csa_header) == 128, "bundle format");
_Static_assert(sizeof(struct csa_variant) == 128, "bundle format");
_Static_assert(sizeof(struct csa_schedule) == 64, "bundle format");
_Static_assert(sizeof(struct csa_image) == 192, "bundle format");

/* What the process did with an image. Nothing is ever unloaded. */
struct csa_image_state {
  struct CUlib_st *library;
  struct CUkern_st *kernel;
  atomic_uint_fast64_t launches;
};

/* The variants among which alignment, size and device choose. */
struct csa_family {
  int32_t operation, ratio, coff, dtype;
};

struct csa_bundle {
  const char *source; /* "embedded", or the path it was read from */
  const uint8_t *data;
  const struct csa_header *header;
  const struct csa_variant *variants;
  const struct csa_schedule *schedules;
  const struct csa_image *images;
  struct csa_image_state *states; /* one for each image */
  int32_t variant_count, schedule_count, image_count, family_count;
  struct csa_family families[CSA_MAX_FAMILIES];
};

/* Check `bytes` of `data` (8-byte aligned) and fill in all of `bundle` but `states`. Every offset,
 * index and string is in bounds afterwards. The images' own digests are checked when they load. */
int csa_bundle_parse(const char *source, const uint8_t *data, size_t bytes,
                     struct csa_bundle *bundle);

/* The process's bundle: chosen by csa_bundle_choose, else by CSA_RUNTIME_BUNDLE, else embedded. The
 * first call opens it; later ones cost one load. */
int csa_bundle_get(const struct csa_bundle **bundle);

/* Use the file at `path`; CSA_ERROR_BUNDLE if another bundle is in use already. */
int csa_bundle_choose(const char *path);

/* In a forked child: forget locks that a thread of the parent may have held. */
void csa_bundle_after_fork(void);

/* Distinct architectures of the bundle's images as "sm_80, sm_90", into `text`. */
const char *csa_bundle_architectures(const struct csa_bundle *bundle, char *text, size_t bytes);

/* Index of a family, or -1. */
static inline int32_t csa_bundle_family(const struct csa_bundle *bundle, int32_t operation,
                                        int32_t ratio, int32_t coff, int32_t dtype) {
  for (int32_t i = 0; i < bundle->family_count; i++) {
    const struct csa_family *f = &bundle->families[i];
    if (f->operation == operation && f->ratio == ratio && f->coff == coff && f->dtype == dtype)
      return i;
  }
  return -1;
}

/* Index of a variant by name, or -1. */
int32_t csa_bundle_variant(const struct csa_bundle *bundle, const char *name);

#endif
