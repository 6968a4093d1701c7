// SPDX-License-Identifier: Apache-2.0
#include "bundle.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "error.h"
#include "sha256.h"

/* Limits far above any real bundle; they keep later arithmetic within int32. */
enum { MAX_RECORDS = 1 << 16, MAX_CTAS = 1 << 24, MAX_SHARED = 1 << 20, MAX_RATIO = 1 << 12 };
enum { MAX_ALIGNMENT = 128, WARP_LOG2 = 5 };

static bool power_of_two(int32_t x) { return x > 0 && (x & (x - 1)) == 0; }

/* Printable ASCII without blanks, which any caller can print and look up. */
static bool is_name(const char *text, size_t bytes) {
  size_t length = strnlen(text, bytes);
  for (size_t i = 0; i < length; i++)
    if (text[i] <= ' ' || text[i] > '~') return false;
  return length > 0 && length < bytes;
}

static const char *bad_variant(const struct csa_variant *v) {
  if (!is_name(v->name, sizeof v->name)) return "its name is no string of printable ASCII";
  if (v->operation < CSA_FORWARD || v->operation > CSA_FINISH) return "unknown operation";
  if (!power_of_two(v->threads) || v->threads < 32 || v->threads > 1024) return "bad block size";
  if (v->dynamic_shared < 0 || v->dynamic_shared > MAX_SHARED) return "bad shared size";
  if (v->parameter_count > CSA_MAX_PARAMETERS) return "too many parameters";
  for (uint32_t i = 0; i < v->parameter_count; i++)
    if (v->parameters[i] >= CSA_PARAMETER_COUNT) return "a parameter this library does not know";
  if (v->operation == CSA_FINISH) {
    if (v->kind != CSA_NO_WINDOW) return "bad kind";
    if (v->ratio != 0 || v->coff != 0 || v->dtype != 0) return "bad window";
    /* At least a warp's width keeps the grid of the largest plane below 2**31 blocks. */
    if (!power_of_two(v->columns) || v->columns < 32 || v->columns > v->threads)
      return "bad column count";
    return NULL;
  }
  if (v->kind < CSA_SHORT || v->kind > CSA_EARLY) return "bad kind";
  if (v->kind == CSA_EARLY && v->operation != CSA_FORWARD) return "bad kind";
  if (v->ratio < 1 || v->ratio > MAX_RATIO || v->coff < 1 || v->coff > 2) return "bad window";
  if (v->dtype < CSA_DTYPE_BF16 || v->dtype > CSA_DTYPE_FP32) return "unknown dtype";
  if (!power_of_two(v->columns) || v->columns > 16) return "bad column count";
  bool several = v->operation == CSA_FORWARD && v->kind == CSA_SHORT;
  if (!power_of_two(v->rows) || v->rows > (several ? 1 << WARP_LOG2 : 1)) return "bad row count";
  if (!power_of_two(v->alignment) || v->alignment < v->columns || v->alignment > MAX_ALIGNMENT)
    return "bad alignment";
  return NULL;
}

static const char *bad_schedule(const struct csa_bundle *bundle, const struct csa_schedule *s) {
  if (s->variant < 0 || s->variant >= bundle->variant_count) return "no such variant";
  const struct csa_variant *v = &bundle->variants[s->variant];
  if (s->operation != v->operation || s->ratio != v->ratio || s->coff != v->coff ||
      s->dtype != v->dtype)
    return "its variant is of another family";
  if (s->lanes_log2 < 0 || s->lanes_log2 > 10 || 1 << s->lanes_log2 > v->threads)
    return "bad lanes_log2";
  if ((v->kind == CSA_LONG || v->kind == CSA_BUFFERED) && s->lanes_log2 != WARP_LOG2)
    return "bad lanes_log2";
  /* Its block adds the sums of two row lanes at a time. */
  if (v->kind == CSA_SHORT && v->operation == CSA_BACKWARD && 2 << s->lanes_log2 > v->threads)
    return "bad lanes_log2";
  if (s->ctas < 0 || s->ctas > MAX_CTAS || s->fill_ctas < 0 || s->fill_ctas > MAX_CTAS)
    return "bad CTA count";
  if ((s->operation == CSA_BACKWARD) != (s->ctas > 0)) return "only backward has CTAs";
  if ((s->operation == CSA_FINISH) != (s->fill_ctas > 0)) return "only finish fills, always";
  if (s->max_elements < -1) return "bad max_elements";
  if (s->max_rows_per_segment < -1 || (v->operation == CSA_FINISH && s->max_rows_per_segment != -1))
    return "bad max_rows_per_segment";
  return NULL;
}

/* The tables follow the header and one another without gaps; the images' bytes follow them. All
 * records are whole multiples of an image's alignment. */
static uint64_t schedules_at(const struct csa_header *h) {
  return sizeof *h + (uint64_t)h->variant_count * sizeof(struct csa_variant);
}

static uint64_t images_at(const struct csa_header *h) {
  return schedules_at(h) + (uint64_t)h->schedule_count * sizeof(struct csa_schedule);
}

static uint64_t tables_end(const struct csa_header *h) {
  return images_at(h) + (uint64_t)h->image_count * sizeof(struct csa_image);
}

static const char *bad_tables(const struct csa_header *h) {
  static const uint8_t zeros[sizeof h->pad];
  if (h->variant_count > MAX_RECORDS || h->schedule_count > MAX_RECORDS ||
      h->image_count > MAX_RECORDS || tables_end(h) > h->total_bytes)
    return "a table lies outside the file";
  if (h->variants != sizeof *h || h->schedules != schedules_at(h) || h->images != images_at(h))
    return "a table is not where the counts put it";
  if (h->reserved != 0 || memcmp(h->pad, zeros, sizeof zeros) != 0) return "a spare byte is set";
  return NULL;
}

static const char *bad_image(const struct csa_bundle *bundle, const struct csa_image *image) {
  uint64_t total = bundle->header->total_bytes;
  if (image->offset < tables_end(bundle->header)) return "it lies over a table";
  if (image->variant < 0 || image->variant >= bundle->variant_count) return "no such variant";
  if (image->arch < 10 || image->arch > 9999) return "bad architecture";
  if (image->static_shared < 0 || image->static_shared > MAX_SHARED) return "bad shared size";
  if (image->offset % 64 != 0 || image->offset > total) return "bad offset";
  if (image->bytes == 0 || image->bytes > total - image->offset) return "bad size";
  if (!is_name(image->symbol, sizeof image->symbol))
    return "its symbol is no string of printable ASCII";
  return NULL;
}

static int damaged(const char *source, const char *what, int64_t index, const char *why) {
  char where[64] = "";
  if (index >= 0) snprintf(where, sizeof where, " %lld", (long long)index);
  return csa_fail(CSA_ERROR_BUNDLE,
                  "bundle %s is damaged: %s%s: %s; reinstall it, or pack it again with "
                  "`python aot/bundle.py pack cubins bundle.bin`",
                  source, what, where, why);
}

static int check_header(const char *source, const struct csa_header *h, size_t bytes) {
  if (bytes < sizeof *h) return damaged(source, "header", -1, "shorter than a header");
  if (memcmp(h->magic, "CSABNDL", 8) != 0) return damaged(source, "header", -1, "no bundle.bin");
  if (h->schema != CSA_BUNDLE_SCHEMA)
    return csa_fail(CSA_ERROR_BUNDLE,
                    "bundle %s has schema %u; this library reads schema %d: use a bundle packed by "
                    "the same version of csa_runtime",
                    source, h->schema, CSA_BUNDLE_SCHEMA);
  if (h->header_bytes != sizeof *h) return damaged(source, "header", -1, "bad header size");
  if (h->total_bytes != bytes) {
    char why[96];
    snprintf(why, sizeof why, "%zu bytes, not the %llu that its header promises", bytes,
             (unsigned long long)h->total_bytes);
    return damaged(source, "file", -1, why);
  }
  const char *why = bad_tables(h);
  return why == NULL ? CSA_OK : damaged(source, "header", -1, why);
}

static const char *add_family(struct csa_bundle *bundle, const struct csa_variant *v) {
  if (csa_bundle_family(bundle, v->operation, v->ratio, v->coff, v->dtype) >= 0) return NULL;
  if (bundle->family_count == CSA_MAX_FAMILIES) return "too many families";
  bundle->families[bundle->family_count++] =
      (struct csa_family){v->operation, v->ratio, v->coff, v->dtype};
  return NULL;
}

int csa_bundle_parse(const char *source, const uint8_t *data, size_t bytes,
                     struct csa_bundle *bundle) {
  const struct csa_header *h = (const struct csa_header *)(const void *)data;
  int status = check_header(source, h, bytes);
  if (status != CSA_OK) return status;
  *bundle = (struct csa_bundle){
      .source = source,
      .data = data,
      .header = h,
      .variants = (const void *)(data + h->variants),
      .schedules = (const void *)(data + h->schedules),
      .images = (const void *)(data + h->images),
      .variant_count = (int32_t)h->variant_count,
      .schedule_count = (int32_t)h->schedule_count,
      .image_count = (int32_t)h->image_count,
  };
  /* The header's own bytes are all implied by these, by its constants and by the file's size. */
  uint8_t digest[32];
  csa_sha256(data + sizeof *h, (size_t)tables_end(h) - sizeof *h, digest);
  if (memcmp(digest, h->tables_sha256, sizeof digest) != 0)
    return damaged(source, "tables", -1, "sha256 differs from the header's");

  const char *why;
  for (int32_t i = 0; i < bundle->variant_count; i++)
    if ((why = bad_variant(&bundle->variants[i])) != NULL ||
        (why = add_family(bundle, &bundle->variants[i])) != NULL)
      return damaged(source, "variant", i, why);
  for (int32_t i = 0; i < bundle->schedule_count; i++)
    if ((why = bad_schedule(bundle, &bundle->schedules[i])) != NULL)
      return damaged(source, "schedule", i, why);
  for (int32_t i = 0; i < bundle->image_count; i++)
    if ((why = bad_image(bundle, &bundle->images[i])) != NULL)
      return damaged(source, "image", i, why);
  return CSA_OK;
}

const char *csa_bundle_architectures(const struct csa_bundle *bundle, char *text, size_t bytes) {
  size_t used = 0;
  text[0] = 0;
  for (int32_t arch = 0, next; used < bytes; arch = next) {
    next = INT32_MAX;
    for (int32_t i = 0; i < bundle->image_count; i++) {
      int32_t candidate = bundle->images[i].arch;
      if (candidate > arch && candidate < next) next = candidate;
    }
    if (next == INT32_MAX) break;
    used += (size_t)snprintf(text + used, bytes - used, "%ssm_%d", used ? ", " : "", next);
  }
  return text[0] != 0 ? text : "no architecture";
}

int32_t csa_bundle_variant(const struct csa_bundle *bundle, const char *name) {
  for (int32_t i = 0; i < bundle->variant_count; i++)
    if (strcmp(bundle->variants[i].name, name) == 0) return i;
  return -1;
}
