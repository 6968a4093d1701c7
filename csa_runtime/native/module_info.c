// SPDX-License-Identifier: Apache-2.0
/* explain, bundle_info, driver_info, launch_counts: structs -> dictionaries. */
#include <string.h>

#include "module.h"
#include "names.h"

/* Append `item`, whose reference is taken; 0 or -1. */
static int append(PyObject *list, PyObject *item) {
  int status = item != NULL ? PyList_Append(list, item) : -1;
  Py_XDECREF(item);
  return status;
}

static PyObject *hex(const uint8_t digest[32]) {
  char text[65];
  for (int i = 0; i < 32; i++) {
    text[2 * i] = "0123456789abcdef"[digest[i] >> 4];
    text[2 * i + 1] = "0123456789abcdef"[digest[i] & 15];
  }
  text[64] = 0;
  return PyUnicode_FromString(text);
}

static PyObject *launches_list(const struct csa_explanation *e) {
  PyObject *list = PyList_New(0);
  for (int32_t i = 0; list != NULL && i < e->plan.launch_count; i++) {
    const struct csa_launch *l = &e->plan.launches[i];
    PyObject *item = Py_BuildValue(
        "{s:s,s:(III),s:(Iii),s:I,s:y#}", "variant", e->bundle->variants[l->variant].name, "grid",
        l->grid[0], l->grid[1], l->grid[2], "block", l->threads, 1, 1, "shared", l->shared,
        "parameters", (const char *)l->parameters, (Py_ssize_t)l->parameter_bytes);
    if (append(list, item) < 0) Py_CLEAR(list);
  }
  return list;
}

/* Whether `object`, which may be NULL, is that string. */
static int is_word(PyObject *object, const char *word) {
  return object != NULL && PyUnicode_Check(object) &&
         PyUnicode_CompareWithASCIIString(object, word) == 0;
}

PyObject *csa_py_explain(PyObject *self, PyObject *const *values, Py_ssize_t count,
                         PyObject *names) {
  (void)self;
  struct csa_call call;
  struct csa_explanation e;
  if (csa_parse_call(CSA_CALLED_EXPLAIN, values, count, names, &call) < 0) return NULL;
  int forward = is_word(call.operation, "forward");
  if (!forward && !is_word(call.operation, "backward")) {
    PyErr_Format(PyExc_ValueError, "operation is %R; pass \"forward\" or \"backward\"",
                 call.operation != NULL ? call.operation : Py_None);
    return NULL;
  }
  PyThreadState *state = PyEval_SaveThread();
  int code = csa_private_explain(forward ? CSA_FORWARD : CSA_BACKWARD, &call.args, call.capability,
                                 call.shared_limit, call.variant, &e);
  PyEval_RestoreThread(state);
  if (code != CSA_OK) return csa_raise(code);
  const struct csa_plan *p = &e.plan;
  PyObject *image = hex(e.bundle->images[p->image].sha256), *launches = launches_list(&e);
  if (image == NULL || launches == NULL) {
    Py_XDECREF(image);
    Py_XDECREF(launches);
    return NULL;
  }
  return Py_BuildValue("{s:s,s:N,s:i,s:i,s:i,s:(III),s:(iii),s:i,s:L,s:L,s:L,s:L,s:N}", "variant",
                       e.bundle->variants[p->variant].name, "image", image, "arch", e.arch,
                       "compute_capability", e.capability, "shared_limit", e.shared_limit, "grid",
                       p->grid[0], p->grid[1], p->grid[2], "block",
                       e.bundle->variants[p->variant].threads, 1, 1, "lanes_log2", p->lanes_log2,
                       "groups", (long long)p->groups, "fill_ctas", (long long)p->fill_ctas,
                       "column_tiles", (long long)p->column_tiles, "workspace_bytes",
                       (long long)p->workspace_bytes, "launches", launches);
}

static PyObject *variants_list(const struct csa_bundle *b) {
  PyObject *list = PyList_New(0);
  for (int32_t i = 0; list != NULL && i < b->variant_count; i++) {
    const struct csa_variant *v = &b->variants[i];
    if (append(list, Py_BuildValue("{s:s,s:s,s:i,s:i,s:s,s:s,s:i,s:i,s:i,s:i}", "name", v->name,
                                   "operation", csa_operation_name(v->operation), "ratio", v->ratio,
                                   "coff", v->coff, "dtype", csa_dtype_name(v->dtype), "kind",
                                   csa_kind_name(v->kind), "columns", v->columns, "alignment",
                                   v->alignment, "threads", v->threads, "dynamic_shared",
                                   v->dynamic_shared)) < 0)
      Py_CLEAR(list);
  }
  return list;
}

static PyObject *images_list(const struct csa_bundle *b) {
  PyObject *list = PyList_New(0);
  for (int32_t i = 0; list != NULL && i < b->image_count; i++) {
    const struct csa_image *m = &b->images[i];
    PyObject *digest = hex(m->sha256);
    if (digest == NULL ||
        append(list, Py_BuildValue("{s:s,s:i,s:N,s:K,s:i,s:i,s:s}", "variant",
                                   b->variants[m->variant].name, "arch", m->arch, "sha256", digest,
                                   "bytes", (unsigned long long)m->bytes, "registers", m->registers,
                                   "static_shared", m->static_shared, "symbol", m->symbol)) < 0)
      Py_CLEAR(list);
  }
  return list;
}

PyObject *csa_py_bundle_info(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  const struct csa_bundle *bundle;
  PyThreadState *state = PyEval_SaveThread();
  int code = csa_private_bundle(&bundle);
  PyEval_RestoreThread(state);
  if (code != CSA_OK) return csa_raise(code);
  PyObject *digest = hex(bundle->header->tables_sha256), *variants = variants_list(bundle),
           *images = images_list(bundle);
  PyObject *source = PyUnicode_DecodeFSDefault(bundle->source);
  if (digest == NULL || variants == NULL || images == NULL || source == NULL) {
    Py_XDECREF(digest);
    Py_XDECREF(variants);
    Py_XDECREF(images);
    Py_XDECREF(source);
    return NULL;
  }
  return Py_BuildValue("{s:N,s:N,s:I,s:N,s:N}", "source", source, "sha256", digest, "schema",
                       bundle->header->schema, "variants", variants, "images", images);
}

static PyObject *device_dict(int32_t ordinal) {
  struct csa_device_info info = {0};
  PyThreadState *state = PyEval_SaveThread();
  int code = csa_private_device(ordinal, &info);
  PyEval_RestoreThread(state);
  if (code != CSA_OK) return csa_raise(code);
  PyObject *arch = info.arch != 0 ? PyLong_FromLong(info.arch) : Py_BuildValue("");
  return Py_BuildValue("{s:i,s:s,s:i,s:i,s:N,s:i}", "ordinal", ordinal, "name", info.name,
                       "compute_capability", info.capability, "shared_limit", info.shared_limit,
                       "arch", arch, "multiprocessors", info.multiprocessors);
}

PyObject *csa_py_driver_info(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  int version = 0, count = 0;
  PyThreadState *state = PyEval_SaveThread();
  int code = csa_private_driver(&version, &count);
  PyEval_RestoreThread(state);
  if (code != CSA_OK) return csa_raise(code);
  PyObject *devices = PyList_New(0);
  for (int32_t i = 0; devices != NULL && i < count; i++)
    if (append(devices, device_dict(i)) < 0) Py_CLEAR(devices);
  return devices != NULL ? Py_BuildValue("{s:i,s:N}", "version", version, "devices", devices)
                         : NULL;
}

PyObject *csa_py_launch_counts(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  const struct csa_bundle *b;
  int code = csa_private_bundle(&b);
  if (code != CSA_OK) return csa_raise(code);
  PyObject *counts = PyDict_New();
  for (int32_t i = 0; counts != NULL && i < b->image_count; i++) {
    unsigned long long launches =
        atomic_load_explicit(&b->states[i].launches, memory_order_relaxed);
    if (launches == 0) continue;
    PyObject *key =
        Py_BuildValue("(si)", b->variants[b->images[i].variant].name, b->images[i].arch);
    PyObject *value = PyLong_FromUnsignedLongLong(launches);
    if (key == NULL || value == NULL || PyDict_SetItem(counts, key, value) < 0) Py_CLEAR(counts);
    Py_XDECREF(key);
    Py_XDECREF(value);
  }
  return counts;
}
