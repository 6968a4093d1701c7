// SPDX-License-Identifier: Apache-2.0
/* The little of a cubin that the fake driver needs: its architecture and its kernels' parameters.
 * Images that are no ELF (a test's dummies) have architecture 0 and no parameters. */
#ifndef FAKE_ELF_H
#define FAKE_ELF_H

#include <elf.h>
#include <stdio.h>
#include <string.h>

enum { MAX_PARAMS = 64, KPARAM_INFO = 0x17, FORM_SIZED = 4 };

struct params {
  int count;
  unsigned offset[MAX_PARAMS], size[MAX_PARAMS];
};

static int elf_is(const unsigned char *code) { return memcmp(code, ELFMAG, SELFMAG) == 0; }

static int elf_arch(const unsigned char *code) {
  const Elf64_Ehdr *header = (const void *)code;
  if (!elf_is(code)) return 0;
  return (int)(code[EI_ABIVERSION] < 8 ? header->e_flags & 0xff : header->e_flags >> 8 & 0xff);
}

static void read_attributes(const unsigned char *at, const unsigned char *end, struct params *out) {
  while (at + 4 <= end) {
    unsigned value = (unsigned)at[2] | (unsigned)at[3] << 8;
    if (at[0] == FORM_SIZED && at[1] == KPARAM_INFO) {
      unsigned words[3];
      memcpy(words, at + 4, sizeof words);
      unsigned ordinal = words[1] & 0xffff;
      out->offset[ordinal] = words[1] >> 16;
      out->size[ordinal] = words[2] >> 18;
      if ((int)ordinal >= out->count) out->count = (int)ordinal + 1;
    }
    at += 4 + (at[0] == FORM_SIZED ? value : 0);
  }
}

/* The parameters of `kernel`, or -1 where the image has no such kernel. */
static int elf_params(const unsigned char *code, const char *kernel, struct params *out) {
  memset(out, 0, sizeof *out);
  if (!elf_is(code)) return 0;
  const Elf64_Ehdr *header = (const void *)code;
  const Elf64_Shdr *sections = (const void *)(code + header->e_shoff);
  const char *names = (const char *)code + sections[header->e_shstrndx].sh_offset;
  char wanted[256];
  snprintf(wanted, sizeof wanted, ".nv.info.%s", kernel);
  for (int i = 0; i < header->e_shnum; i++) {
    if (strcmp(names + sections[i].sh_name, wanted) != 0) continue;
    const unsigned char *start = code + sections[i].sh_offset;
    read_attributes(start, start + sections[i].sh_size, out);
    return 0;
  }
  return -1;
}

#endif
