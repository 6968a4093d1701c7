// SPDX-License-Identifier: Apache-2.0
/* What the fake driver remembers, how it records a call, and the rules that several calls share. */
#ifndef FAKE_STATE_H
#define FAKE_STATE_H

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fake_elf.h"

enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101 };
enum { INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_HANDLE = 400, NOT_FOUND = 500 };
enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_IMPLICIT = 906 };
enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2, NOT_CAPTURING = -1 };
enum { MAX = 64, MAX_KERNELS = 512 };

struct context {
  int device, primary, references;
  unsigned long long id;
};
struct stream {
  struct context *context;
  int capture;
  pthread_t owner;
  int invalidated;
};
struct library {
  const unsigned char *code;
  int arch;
};
struct kernel {
  struct library *library;
  char name[96];
  struct params params;
  int loaded[MAX];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct context contexts[MAX], primaries[MAX];
static struct stream streams[MAX];
static struct library libraries[MAX_KERNELS];
static struct kernel kernels[MAX_KERNELS];
static int context_count, stream_count, library_count, kernel_count, started;
static int calls[MAX];
static const char *call_names[MAX];
static __thread struct context *stack[MAX];
static __thread int depth, mode = GLOBAL;

static const char *setting(const char *name, const char *fallback) {
  const char *value = getenv(name);
  return value && value[0] ? value : fallback;
}

static int capability(int device) {
  const char *at = setting("FAKE_CUDA_DEVICES", "90");
  if (strcmp(at, "none") == 0) return 0;
  for (; device > 0 && at; device--) at = (at = strchr(at, ',')) ? at + 1 : NULL;
  return at ? atoi(at) : 0;
}

static int shared_limit(int device) {
  const char *forced = setting("FAKE_CUDA_SHARED", NULL);
  if (forced) return atoi(forced);
  int cc = capability(device);
  if (cc == 80 || cc == 87) return 163 << 10;
  return cc / 10 >= 9 && cc / 10 <= 11 ? 227 << 10 : 99 << 10;
}

static int version(void) { return atoi(setting("FAKE_CUDA_VERSION", "12080")); }

/* One line; `details` is a list of JSON members. */
static int record(const char *call, int result, const char *details) {
  const char *path = setting("FAKE_CUDA_LOG", NULL);
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return result;
  fprintf(
      file,
      "{\"call\": \"%s\", \"result\": %d, \"thread\": %ld, \"mode\": %d, \"current\": %d%s%s}\n",
      call, result, syscall(SYS_gettid), mode, depth ? (int)(stack[depth - 1] - contexts) : -1,
      details[0] ? ", " : "", details);
  fclose(file);
  return result;
}

/* Count a call; the error that the test ordered, or 0. */
static int ordered(const char *call) {
  int i = 0, nth = 0, code = 0;
  char name[64] = "";
  while (call_names[i] && strcmp(call_names[i], call) != 0) i++;
  call_names[i] = call;
  calls[i]++;
  sscanf(setting("FAKE_CUDA_FAIL", ""), "%63[^:]:%d:%d", name, &nth, &code);
  return strcmp(name, call) == 0 && calls[i] == nth ? code : 0;
}

#define BEGIN(name)           \
  char details[4096] = "";    \
  const char *call = name;    \
  pthread_mutex_lock(&lock);  \
  int result = ordered(call); \
  if (result) goto end;       \
  if (!started) {             \
    result = NOT_INITIALIZED; \
    goto end;                 \
  }
#define END                      \
  end:                           \
  record(call, result, details); \
  pthread_mutex_unlock(&lock);   \
  return result;
#define FAIL(code)   \
  do {               \
    result = (code); \
    goto end;        \
  } while (0)
#define DETAILS(...) snprintf(details, sizeof details, __VA_ARGS__)

static struct context *current(void) { return depth ? stack[depth - 1] : NULL; }
static int number(const struct context *context) {
  return context ? (int)(context - contexts) : -1;
}
static int is_special(const void *stream) { return (uintptr_t)stream <= 2; }

/* Slots of destroyed contexts are used again, like handles; ids, which count from 0, are not. */
static struct context *new_context(int device) {
  static unsigned long long ids;
  int i = 0;
  while (i < context_count && contexts[i].references) i++;
  contexts[i] = (struct context){device, 0, 1, ids++};
  if (i == context_count) context_count++;
  for (int k = 0; k < kernel_count; k++) kernels[k].loaded[i] = 0;
  return &contexts[i];
}

/* Loading beside a capture, without the relaxed mode, fails and spoils the captures. */
static int forbidden(void) {
  int found = 0;
  for (int i = 0; i < stream_count; i++) {
    struct stream *s = &streams[i];
    if (s->capture == NOT_CAPTURING || mode == RELAXED) continue;
    if ((s->capture == GLOBAL && mode == GLOBAL) ||
        (s->capture != RELAXED && pthread_equal(s->owner, pthread_self())))
      found = s->invalidated = 1;
  }
  return found;
}

static int runs(int arch, int cc) { return arch == 0 || (arch / 10 == cc / 10 && arch <= cc); }

#endif
