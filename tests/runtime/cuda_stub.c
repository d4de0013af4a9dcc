/* The driver's functions that ds41_tvm.runtime.cuda_driver calls, over memory of the process: to test the calls
   themselves where there is no GPU. Copies and fills run at once, or are recorded while a stream is captured. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char text[1 << 20];
static size_t used;
static int capability[2] = {9, 0}, devices = 1, init_status, fail_alloc;
static void *capturing;
static uintptr_t next_handle = 0x1000;

struct op { int set; uint64_t to, from; size_t size; };
struct graph { struct op ops[64]; int count; };
static struct graph *recording;

static void note(const char *format, uintptr_t a, uintptr_t b) {
  if (used < sizeof text - 200) used += sprintf(text + used, format, a, b);
}
const char *stub_log(void) { text[used] = 0; used = 0; return text; }
void stub_set(int major, int minor, int count, int init, int alloc) {
  capability[0] = major; capability[1] = minor; devices = count; init_status = init; fail_alloc = alloc;
}

int cuInit(unsigned flags) { return init_status; }
int cuDriverGetVersion(int *out) { *out = 13000; return 0; }
int cuGetErrorName(int status, const char **out) { *out = status == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_STUB"; return 0; }
int cuDeviceGetCount(int *out) { *out = devices; return 0; }
int cuDeviceGet(int *out, int number) { *out = number; return 0; }
int cuDeviceGetName(char *out, int size, int device) { snprintf(out, size, "Stub %d", device); return 0; }
int cuDeviceGetAttribute(int *out, int which, int device) {
  *out = which == 16 ? 4 : which == 75 ? capability[0] : which == 76 ? capability[1] : 0;
  return 0;
}
int cuDeviceTotalMem_v2(size_t *out, int device) { *out = (size_t)1 << 34; return 0; }
int cuDevicePrimaryCtxRetain(void **out, int device) { *out = (void *)0x77; return 0; }
int cuCtxSetCurrent(void *context) { return context == (void *)0x77 ? 0 : 201; }
int cuCtxSynchronize(void) { return 0; }

int cuMemAlloc_v2(uint64_t *out, size_t size) {
  note("alloc %lu\n", size, 0);
  if (fail_alloc) return 2;
  *out = (uint64_t)aligned_alloc(256, (size + 255) / 256 * 256);
  memset((void *)*out, 0xFF, size);
  return 0;
}
int cuMemHostAlloc(void **out, size_t size, unsigned flags) {
  note("pinned %lu\n", size, 0);
  *out = aligned_alloc(256, (size + 255) / 256 * 256);
  return 0;
}
static int run(struct op op, void *stream) {
  if (capturing && stream == capturing) { recording->ops[recording->count++] = op; return 0; }
  if (op.set >= 0) memset((void *)op.to, op.set, op.size);
  else memcpy((void *)op.to, (void *)op.from, op.size);
  return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, void *from, size_t size, void *stream) {
  note("upload %lu on %lu\n", size, (uintptr_t)stream);
  return run((struct op){-1, to, (uint64_t)from, size}, stream);
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
  note("download %lu on %lu\n", size, (uintptr_t)stream);
  return run((struct op){-1, (uint64_t)to, from, size}, stream);
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
  note("copy %lu on %lu\n", size, (uintptr_t)stream);
  return run((struct op){-1, to, from, size}, stream);
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, void *stream) {
  note("fill %lu on %lu\n", size, (uintptr_t)stream);
  return run((struct op){value, to, 0, size}, stream);
}

int cuStreamCreate(void **out, unsigned flags) { *out = (void *)(next_handle += 16); return flags == 1 ? 0 : 1; }
int cuStreamSynchronize(void *stream) { note("synchronize %lu\n", (uintptr_t)stream, 0); return 0; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { note("%lu waits for %lu\n", (uintptr_t)stream, (uintptr_t)event); return capturing ? 905 : 0; }
int cuEventCreate(void **out, unsigned flags) { *out = (void *)(next_handle += 16); return 0; }
int cuEventRecord(void *event, void *stream) { note("event %lu on %lu\n", (uintptr_t)event, (uintptr_t)stream); return 0; }
int cuEventSynchronize(void *event) { note("host waits for %lu\n", (uintptr_t)event, 0); return 0; }
int cuEventElapsedTime(float *out, void *begin, void *end) { *out = 2.5f; return 0; }

int cuStreamBeginCapture_v2(void *stream, int mode) {
  note("capture on %lu\n", (uintptr_t)stream, 0);
  if (!stream || capturing) return 900;
  capturing = stream;
  recording = calloc(1, sizeof *recording);
  return 0;
}
int cuStreamEndCapture(void *stream, void **out) {
  note("captured on %lu\n", (uintptr_t)stream, 0);
  if (stream != capturing) return 901;
  capturing = 0;
  *out = recording;
  return 0;
}
int cuGraphInstantiateWithFlags(void **out, void *graph, unsigned long long flags) {
  *out = malloc(sizeof(struct graph));
  memcpy(*out, graph, sizeof(struct graph));
  return 0;
}
int cuGraphDestroy(void *graph) { free(graph); return 0; }
int cuGraphExecDestroy(void *graph) { free(graph); return 0; }
int cuGraphLaunch(void *graph, void *stream) {
  struct graph *g = graph;
  note("graph on %lu\n", (uintptr_t)stream, 0);
  for (int i = 0; i < g->count; i++) run(g->ops[i], stream);
  return 0;
}
