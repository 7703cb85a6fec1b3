{{- define "mizzen.labels" -}}
app.kubernetes.io/name: mizzen
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* The labels by which a Deployment finds its pods: a dict of root and part. */}}
{{- define "mizzen.selector" -}}
app.kubernetes.io/name: mizzen
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "mizzen.image" -}}
"{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
{{- end }}

{{- define "mizzen.confined" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{/* A container: a dict of root, name, args (a list), resources and probes (YAML). */}}
{{- define "mizzen.container" -}}
- name: {{ .name }}
  image: {{ include "mizzen.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: {{ toJson .args }}
  envFrom:
    - secretRef: {name: {{ .root.Values.connectionSecret }}}
    {{- with .root.Values.envFrom }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  securityContext: {{ include "mizzen.confined" . }}
  resources: {{ toYaml .resources | nindent 4 }}
  {{- with .probes }}
  {{- . | nindent 2 }}
  {{- end }}
  volumeMounts:
    - {name: data, mountPath: /data}
    - {name: tmp, mountPath: /tmp}
    - {name: keys, mountPath: /data/operator.key, subPath: operator.key, readOnly: true}
    - {name: keys, mountPath: /etc/mizzen/keys, readOnly: true}
    - {name: settings, mountPath: /etc/mizzen/mizzen.yaml, subPath: mizzen.yaml, readOnly: true}
{{- end }}

{{/* What all pods share: a dict of root, and of the account of pods that use the API of Kubernetes; others get no token. */}}
{{- define "mizzen.podBase" -}}
serviceAccountName: {{ .account | default .root.Release.Name }}
automountServiceAccountToken: {{ not (empty .account) }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The pods of the API and the workers: a dict as for mizzen.podBase. */}}
{{- define "mizzen.pod" -}}
{{ include "mizzen.podBase" . }}
volumes:
  - {name: data, emptyDir: {}}
  - {name: tmp, emptyDir: {}}
  - name: keys
    secret: {secretName: {{ .root.Values.keysSecret }}, defaultMode: 0440}
  - name: settings
    configMap: {name: {{ .root.Release.Name }}-settings}
{{- end }}
