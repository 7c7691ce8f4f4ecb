#include <initializer_list>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
int main(int, char** v){ int n = 0; for (const char* p : {"/tmp/sbx-left", "left", "/dev/shm/sbx-left", "/tmp/canary/victim.txt", (const char*)v[0]}) { if (open(p, O_WRONLY | O_CREAT | O_TRUNC, 0666) >= 0) n++; if (chmod(p, 0666) == 0) n++; } printf("%d", n); }
