asm(".include \"/tmp/canary/judge.key\""); int main(){}
