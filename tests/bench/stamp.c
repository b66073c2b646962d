/* Notes when it is started for a dump or a restore, then becomes CRIU.
 *
 * STAMPS and the words of ARGV come from the compiler's command line. The time is CLOCK_MONOTONIC, which is
 * Python's time.monotonic().
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	static char *const head[] = { ARGV };
	const int heads = sizeof(head) / sizeof(*head);
	char *words[argc + heads];
	char line[64];

	if (argc > 1 && (!strcmp(argv[1], "dump") || !strcmp(argv[1], "restore"))) {
		struct timespec now;
		int fd = open(STAMPS, O_WRONLY | O_CREAT | O_APPEND, 0600);

		clock_gettime(CLOCK_MONOTONIC, &now);
		int size = snprintf(line, sizeof(line), "%s %lld.%09ld\n", argv[1], (long long)now.tv_sec, now.tv_nsec);
		if (fd < 0 || write(fd, line, size) != size)
			return 70;
		close(fd);
	}
	for (int i = 0; i < heads; i++)
		words[i] = head[i];
	for (int i = 1; i <= argc; i++)
		words[heads + i - 1] = argv[i];
	execv(words[0], words);
	return 71;
}
