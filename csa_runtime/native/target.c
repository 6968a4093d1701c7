// SPDX-License-Identifier: Apache-2.0
#include "target.h"

#include <stdlib.h>

#include "error.h"

/* Integrated parts that do not run their major's plain images. */
enum { ORIN = 87 };
enum { FIRST_CAPABILITY = 80 }; /* with the bf16 arithmetic that every kernel uses */

/* Shared memory that one block may opt into, by compute capability. */
static const struct {
  int32_t capability, bytes;
} SHARED[] = {{80, 163 << 10}, {86, 99 << 10},   {87, 163 << 10},  {89, 99 << 10},
              {90, 227 << 10}, {100, 227 << 10}, {103, 227 << 10}, {110, 227 << 10}};
enum { SHARED_EVERYWHERE = 99 << 10 };

int32_t csa_target_arch(const struct csa_bundle *bundle, int32_t capability) {
  int32_t best = 0;
  for (int32_t i = 0; i < bundle->image_count; i++) {
    int32_t arch = bundle->images[i].arch;
    if (arch / 10 != capability / 10 || arch > capability || arch <= best) continue;
    if (capability == ORIN && arch != ORIN) continue;
    best = arch;
  }
  return best;
}

static int unserved(const struct csa_bundle *bundle, const char *who, int32_t capability) {
  char archs[256];
  csa_bundle_architectures(bundle, archs, sizeof archs);
  if (capability < FIRST_CAPABILITY)
    return csa_fail(CSA_ERROR_ARCH,
                    "%s has compute capability %d.%d; the bundle (%s) holds images for %s, and no "
                    "image can be built for a GPU before compute capability 8.0",
                    who, capability / 10, capability % 10, bundle->source, archs);
  return csa_fail(CSA_ERROR_ARCH,
                  "%s has compute capability %d.%d; the bundle (%s) holds images for %s and none "
                  "that it runs; in a source checkout add its architecture to ARCHITECTURES in "
                  "aot/variants.py, run tools/build_cubins, pack the result with `python "
                  "aot/bundle.py pack cubins bundle.bin` and choose that with load(bundle=...) or "
                  "CSA_RUNTIME_BUNDLE",
                  who, capability / 10, capability % 10, bundle->source, archs);
}

int csa_target_init(const struct csa_bundle *bundle, const char *who, int32_t capability,
                    int32_t shared_limit, struct csa_target *target) {
  int32_t arch = csa_target_arch(bundle, capability);
  if (arch == 0) return unserved(bundle, who, capability);
  if (shared_limit <= 0) {
    shared_limit = SHARED_EVERYWHERE;
    for (size_t i = 0; i < sizeof SHARED / sizeof SHARED[0]; i++)
      if (SHARED[i].capability == capability) shared_limit = SHARED[i].bytes;
  }
  int32_t *images = malloc(((size_t)bundle->variant_count + 1) * sizeof *images);
  if (images == NULL) return csa_fail(CSA_ERROR_MEMORY, "no host memory");
  *target = (struct csa_target){
      .capability = capability, .arch = arch, .shared_limit = shared_limit, .images = images};
  for (int32_t i = 0; i < bundle->variant_count; i++) images[i] = -1;
  for (int32_t i = bundle->image_count - 1; i >= 0; i--)
    if (bundle->images[i].arch == arch) images[bundle->images[i].variant] = i;
  for (int32_t i = bundle->schedule_count - 1; i >= 0; i--) {
    const struct csa_schedule *row = &bundle->schedules[i];
    if (row->arch != arch) continue;
    int32_t f = csa_bundle_family(bundle, row->operation, row->ratio, row->coff, row->dtype);
    if (target->end_row[f] == 0) target->end_row[f] = i + 1;
    target->first_row[f] = i;
  }
  return CSA_OK;
}

int32_t csa_target_shared_bytes(const struct csa_bundle *bundle, const struct csa_target *target,
                                int32_t variant) {
  return bundle->images[target->images[variant]].static_shared +
         bundle->variants[variant].dynamic_shared;
}
