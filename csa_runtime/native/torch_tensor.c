// SPDX-License-Identifier: Apache-2.0
#include "torch_tensor.h"

static const uintptr_t OFFSETS_END = (uintptr_t)1 << 40; /* bytes from a storage's start; ample */

/* Set once, and kept for the life of the process. The interpreter's lock guards them. */
static PyObject *tensor_type, *parameter_type, *raw_stream;
static PyObject *is_neg, *requires_grad, *new_empty, *storage_offset;
static int (*describe)(void *object, dl_tensor *tensor);

/* A table of another name or version is none. */
PyObject *csa_py_bind_torch(PyObject *self, PyObject *const *values, Py_ssize_t count) {
  (void)self;
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "bind_torch() takes 4 arguments");
    return NULL;
  }
  const dl_exchange_api *api = NULL;
  if (PyCapsule_IsValid(values[2], DL_EXCHANGE_API_NAME))
    api = PyCapsule_GetPointer(values[2], DL_EXCHANGE_API_NAME);
  if (is_neg == NULL) is_neg = PyUnicode_InternFromString("is_neg");
  if (requires_grad == NULL) requires_grad = PyUnicode_InternFromString("requires_grad");
  if (new_empty == NULL) new_empty = PyUnicode_InternFromString("new_empty");
  if (storage_offset == NULL) storage_offset = PyUnicode_InternFromString("storage_offset");
  if (is_neg == NULL || requires_grad == NULL || new_empty == NULL || storage_offset == NULL)
    return NULL;
  if (tensor_type == NULL && api != NULL && api->major == DL_MAJOR_VERSION) {
    Py_INCREF(parameter_type = values[1]);
    Py_INCREF(raw_stream = values[3]);
    Py_INCREF(tensor_type = values[0]);
    describe = api->describe;
  }
  Py_INCREF(Py_None);
  return Py_None;
}

static bool is_empty(const dl_tensor *view) {
  bool empty = false;
  for (int32_t i = 0; i < view->ndim; i++) empty |= view->shape[i] == 0;
  return empty;
}

/* Of a tensor with elements. Where its storage was freed, a view's address is its offset alone. */
static bool has_storage(PyObject *tensor, const dl_tensor *view) {
  if (view->data == NULL) return false; /* or a wrapper around another tensor */
  if ((uintptr_t)view->data >= OFFSETS_END) return true;
  PyObject *offset = PyObject_CallMethodObjArgs(tensor, storage_offset, NULL);
  uint64_t elements = offset != NULL ? PyLong_AsUnsignedLongLong(offset) : 0;
  Py_XDECREF(offset);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return (uintptr_t)view->data != elements * view->bits / 8;
}

bool csa_torch_has_memory(PyObject *tensor, dl_tensor *view) {
  PyObject *type = (PyObject *)Py_TYPE(tensor);
  if (describe == NULL || (type != tensor_type && type != parameter_type)) return false;
  if (describe(tensor, view) != 0) {
    PyErr_Clear(); /* the array operations find out again, and explain */
    return false;
  }
  view->data = (char *)view->data + view->byte_offset;
  return view->device_type == DL_CUDA && view->lanes == 1 && view->strides != NULL &&
         (is_empty(view) || has_storage(tensor, view));
}

bool csa_torch_read(PyObject *tensor, dl_tensor *view) {
  if (!csa_torch_has_memory(tensor, view)) return false;
  if (view->code == DL_INT || view->code == DL_UINT) return true;
  /* The memory of a negative holds the opposite values; the description does not tell. */
  PyObject *negative = PyObject_CallMethodObjArgs(tensor, is_neg, NULL);
  if (negative == NULL) PyErr_Clear();
  Py_XDECREF(negative); /* a constant of the interpreter */
  return negative == Py_False;
}

bool csa_torch_is_writable(PyObject *tensor) {
  PyObject *required = PyObject_GetAttr(tensor, requires_grad);
  if (required == NULL) PyErr_Clear();
  Py_XDECREF(required);
  return required == Py_False;
}

int32_t csa_torch_dtype(const dl_tensor *view) {
  if (view->code == DL_BFLOAT && view->bits == 16) return CSA_DTYPE_BF16;
  if (view->code == DL_FLOAT && view->bits == 16) return CSA_DTYPE_FP16;
  return view->code == DL_FLOAT && view->bits == 32 ? CSA_DTYPE_FP32 : 0;
}

static bool is_aligned(const dl_tensor *view) {
  return ((uintptr_t)view->data & (view->bits / 8u - 1)) == 0;
}

/* -1 where there are gaps. */
static int64_t contiguous_elements(const dl_tensor *view) {
  int64_t step = 1;
  for (int32_t i = view->ndim - 1; i >= 0; i--) {
    if (view->strides[i] != step && view->shape[i] != 1) return -1;
    step *= view->shape[i];
  }
  return step;
}

bool csa_torch_is_matrix(const dl_tensor *view, const dl_tensor *kv) {
  return view->ndim == 2 && view->strides[1] == 1 && view->strides[0] >= 0 &&
         view->code == kv->code && view->bits == kv->bits && view->device_id == kv->device_id &&
         is_aligned(view);
}

bool csa_torch_is_array(const dl_tensor *view, const dl_tensor *kv, uint8_t code, int32_t ndim) {
  return view->code == code && view->bits == 32 && view->ndim == ndim &&
         view->device_id == kv->device_id && is_aligned(view) && contiguous_elements(view) >= 0;
}

int64_t csa_torch_scratch_bytes(const dl_tensor *view, const dl_tensor *kv) {
  bool plain = view->code == DL_INT || view->code == DL_UINT || view->code == DL_FLOAT ||
               (view->code == DL_BFLOAT && view->bits == 16);
  if (!plain || view->bits < 8 || view->device_id != kv->device_id ||
      ((uintptr_t)view->data & 15) != 0)
    return -1;
  return contiguous_elements(view) * (view->bits / 8);
}

bool csa_torch_current_stream(int32_t device, void **stream) {
  PyObject *index = PyLong_FromLong(device);
  if (index == NULL) return false;
  PyObject *handle = PyObject_CallFunctionObjArgs(raw_stream, index, NULL);
  Py_DECREF(index);
  if (handle == NULL) return false;
  *stream = PyLong_AsVoidPtr(handle);
  Py_DECREF(handle);
  return PyErr_Occurred() == NULL;
}

PyObject *csa_torch_empty(PyObject *like, int64_t rows, int64_t columns) {
  PyObject *shape = Py_BuildValue("(LL)", (long long)rows, (long long)columns);
  if (shape == NULL) return NULL;
  PyObject *made = PyObject_CallMethodObjArgs(like, new_empty, shape, NULL);
  Py_DECREF(shape);
  return made;
}
