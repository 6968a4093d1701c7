// SPDX-License-Identifier: Apache-2.0
/* Which bundle the process uses, decided once. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bundle.h"
#include "driver.h"
#include "error.h"

/* From embed.S. */
extern const uint8_t csa_embedded_begin[] __attribute__((visibility("hidden")));
extern const uint8_t csa_embedded_end[] __attribute__((visibility("hidden")));

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct csa_bundle opened;
static _Atomic(const struct csa_bundle *) current;
static const char *from_environment; /* read at the first use; NULL or a path */
static int environment_was_read;

void csa_bundle_after_fork(void) { lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; }

static int unreadable(const char *path, const char *why) {
  return csa_fail(CSA_ERROR_BUNDLE, "bundle %s: %s; pass the path of a readable bundle.bin", path,
                  why);
}

/* The whole file in memory: a mapping would change under us where the file is rewritten. */
static int read_file(const char *path, uint8_t **data, size_t *bytes) {
  int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO would wait for a writer */
  if (file < 0) return unreadable(path, strerror(errno));
  struct stat info;
  int status = CSA_OK;
  void *memory = NULL;
  size_t got = 0;
  if (fstat(file, &info) != 0) {
    status = unreadable(path, strerror(errno));
  } else if (!S_ISREG(info.st_mode) || info.st_size <= 0) {
    status = unreadable(path, "not a regular file with contents");
  } else if (posix_memalign(&memory, 64, (size_t)info.st_size) != 0) {
    memory = NULL;
    status = csa_fail(CSA_ERROR_MEMORY, "no memory for the %lld bytes of bundle %s",
                      (long long)info.st_size, path);
  }
  while (status == CSA_OK && got < (size_t)info.st_size) {
    ssize_t n = read(file, (char *)memory + got, (size_t)info.st_size - got);
    if (n == 0) break; /* it shrank: the parser compares the size with the header's */
    if (n < 0 && errno != EINTR) status = unreadable(path, strerror(errno));
    if (n > 0) got += (size_t)n;
  }
  close(file);
  if (status != CSA_OK) free(memory);
  *data = memory;
  *bytes = got;
  return status;
}

/* With the lock held: open `path`, or the embedded bundle for NULL, and publish it. */
static int open_bundle(const char *path) {
  const uint8_t *data = csa_embedded_begin;
  size_t bytes = (size_t)(csa_embedded_end - csa_embedded_begin);
  char *source = NULL;
  uint8_t *owned = NULL;
  int status = CSA_OK;
  if (path != NULL) {
    status = read_file(path, &owned, &bytes);
    if (status != CSA_OK) return status;
    data = owned;
    source = strdup(path);
  }
  if (path != NULL && source == NULL) status = csa_fail(CSA_ERROR_MEMORY, "no host memory");
  if (status == CSA_OK)
    status = csa_bundle_parse(path != NULL ? source : "embedded", data, bytes, &opened);
  if (status == CSA_OK) {
    opened.states = calloc((size_t)opened.image_count + 1, sizeof *opened.states);
    if (opened.states == NULL) status = csa_fail(CSA_ERROR_MEMORY, "no host memory");
  }
  if (status != CSA_OK) {
    free(owned);
    free(source);
    return status;
  }
  atomic_store_explicit(&current, &opened, memory_order_release);
  return CSA_OK;
}

int csa_bundle_get(const struct csa_bundle **bundle) {
  *bundle = atomic_load_explicit(&current, memory_order_acquire);
  if (*bundle != NULL) return CSA_OK;
  csa_watch_forks();
  pthread_mutex_lock(&lock);
  int status = CSA_OK;
  if (atomic_load_explicit(&current, memory_order_relaxed) == NULL) {
    if (!environment_was_read) {
      const char *path = getenv("CSA_RUNTIME_BUNDLE");
      from_environment = path != NULL && path[0] != 0 ? strdup(path) : NULL;
      environment_was_read = 1;
    }
    status = open_bundle(from_environment);
  }
  *bundle = atomic_load_explicit(&current, memory_order_relaxed);
  pthread_mutex_unlock(&lock);
  return status;
}

int csa_bundle_choose(const char *path) {
  csa_watch_forks();
  pthread_mutex_lock(&lock);
  const struct csa_bundle *used = atomic_load_explicit(&current, memory_order_relaxed);
  int status = CSA_OK;
  if (used == NULL)
    status = open_bundle(path);
  else if (used->data == csa_embedded_begin || strcmp(used->source, path) != 0)
    status = csa_fail(CSA_ERROR_BUNDLE,
                      "bundle %s was chosen after the first use of another (%s); call "
                      "load(bundle=...) or set CSA_RUNTIME_BUNDLE before any other call",
                      path, used->source);
  pthread_mutex_unlock(&lock);
  return status;
}
