/* A libcuda.so.1 that is none: the state that cuda-checkpoint keeps in a process, where CRIU finds it too.
 *
 * Linked into a program with -DWORKER it is the tree that tests freeze: the first argument says how many
 * processes use CUDA, the second how many only have the library.
 */
#include <string.h>
#include <sys/prctl.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef WORKER
int cuInit(unsigned flags);

int main(int argc, char **argv)
{
    int with = atoi(argv[1]), without = argc > 2 ? atoi(argv[2]) : 0;
    for (int number = 1; number < with + without; number++)
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (number < with)
                cuInit(0);
            for (;;)
                pause();
        }
    cuInit(0);
    for (;;)
        pause();
}
#else
/* Found by its first 16 bytes in the library's writable memory; state: 0 not begun, else 1 + CUprocessState. */
struct { char magic[16]; int state; int calls; } cuda_stub __attribute__((aligned(64))) = {"HIBERNODE-CUDA-", 0, 0};

int cuInit(unsigned flags)
{
    (void)flags;
    cuda_stub.state = 1;
    return 0;
}

/* What check.sh's program calls; the memory of the GPU is the process's own. */
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { return (void)flags, (void)device, *context = 0, 0; }
int cuMemAlloc_v2(unsigned long long *memory, size_t size) { return !(*memory = (unsigned long long)malloc(size)); }
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t size) { return memcpy((void *)to, from, size), 0; }
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) { return memcpy(to, (void *)from, size), 0; }
#endif
